"""The model `mmrec100m`: PyTorch's MMRec100M, two stacks of blocks (experts) over one embedding, and a fusion.

The checkpoint's configuration is the trainer's, and its vocabulary may have been overruled by the tokenizer: sizes come
from the tensors alone. num_heads is without effect there, because the memory is always empty.
"""
from .common import Rejected
from .mmrec import block_specs, linear
from .tensors import (TOKEN_IDS, check_heads, expect, given_settings, is_plain, layer_count, refuse_unknown, select_tensors,
                      shape_of)

MODEL_TYPE = "mmrec100m"
EXPERTS = ("both", "text", "code")
CONFIG_KEYS = ("config", "args")  # a later one wins
OWN_SETTINGS = ("num_heads", "mdi_mix", "expert", "fusion_method")


def is_one(tensors):
    return any(name.startswith(("text_expert.", "code_expert.", "fusion.")) for name in tensors)


def infer_config(tensors):
    vocab_size, expert_dim = shape_of(tensors, "embedding.weight", 2)
    if expert_dim % 4:
        raise Rejected(f"embedding.weight: found {expert_dim} columns, expected a multiple of 4")
    layers = [layer_count(tensors, expert + "_expert.blocks.") for expert in ("text", "code")]
    if layers[0] != layers[1]:
        raise Rejected(f"code_expert.blocks: found {layers[1]} layers, expected {layers[0]} as in text_expert")
    return {"vocab_size": vocab_size, "expert_dim": expert_dim, "num_layers": layers[0],
            "ffn_dim": shape_of(tensors, "text_expert.blocks.0.ffn.0.weight", 2)[0]}


def choose_config(inferred, root, given, options):
    settings = {}
    for source in (root.get(key) for key in CONFIG_KEYS):
        if isinstance(source, dict):
            settings.update((key, source[key]) for key in OWN_SETTINGS if source.get(key) is not None and is_plain(source[key]))
    settings.update(given_settings(given, MODEL_TYPE, inferred))
    if options.num_heads is not None:
        settings["num_heads"] = options.num_heads
    if options.expert is not None:
        settings["expert"] = options.expert
    expect(settings, "fusion_method", lambda value: value == "concatenate", "'concatenate'")
    heads = settings.get("num_heads", 1)
    check_heads(heads, "expert_dim", inferred["expert_dim"])
    return {"model_type": MODEL_TYPE, **inferred, "num_heads": heads,
            **{key: settings[key] for key in ("mdi_mix", *TOKEN_IDS) if key in settings},
            "expert": settings.get("expert", "both")}


def tensor_specs(config):
    """(name, shape, required) of every tensor of the model."""
    v, e = config["vocab_size"], config["expert_dim"]
    specs = [("embedding.weight", (v, e), True), ("final_norm.weight", (2 * e,), True), ("lm_head.weight", (v, 2 * e), True)]
    specs += linear("fusion.fusion_proj", 2 * e, 2 * e)
    block = block_specs(e, config["ffn_dim"])
    for expert in ("text_expert.", "code_expert."):
        specs.append((expert + "norm.weight", (e,), True))
        for layer in range(config["num_layers"]):
            specs += [(f"{expert}blocks.{layer}.{name}", shape, True) for name, shape, _ in block]
    return specs


def plan(tensors, root, given, options):
    """(config.json, the tensors to write, the names of the others) of a state dict."""
    gate = next((name for name in tensors if name.startswith("fusion.gate.")), None)
    if gate is not None:
        raise Rejected(f"fusion_method: found weighted (by the tensor {gate}), expected concatenate: the public code's own "
                       "forward pass fails with it")
    config = choose_config(infer_config(tensors), root, given, options)
    selected, others = select_tensors(tensors, tensor_specs(config))
    refuse_unknown(others, lambda name: ".mdi.W_planning_" in name)
    return config, selected, others
