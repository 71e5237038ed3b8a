"""The model `mmrec-jax`: Flax's MMRecModel. Names are those of its tree joined by dots; kernels are [in, out] and stay so.

Sizes come from the tensors; the number of heads and the length of the memory bank, which no shape tells, from the run's
own JSON configuration. Whether the run wrote its bank at all nothing tells: the user must.
"""
from .common import Rejected
from .tensors import (TOKEN_IDS, check_heads, expect, given_settings, layer_count, refuse_unknown, select_tensors, shape_of)

MODEL_TYPE = "mmrec-jax"
CALLS = ("stepwise", "prompt", "whole")


def infer_config(tensors):
    vocab_size, model_dim = shape_of(tensors, "shared_embed.embedding", 2)
    if model_dim % 4:
        raise Rejected(f"shared_embed.embedding: found {model_dim} columns, expected a multiple of 4")
    return {"vocab_size": vocab_size, "model_dim": model_dim, "num_layers": layer_count(tensors, "block_")}


def choose_config(inferred, given, options):
    settings = given_settings(given, MODEL_TYPE, inferred)
    if options.num_heads is not None:
        settings["num_heads"] = options.num_heads
    if options.bank is not None:
        settings["bank"] = options.bank == "true"
    if options.calls is not None:
        settings["calls"] = options.calls
    if "num_heads" not in settings:
        raise Rejected("num_heads is not in the checkpoint and no shape tells it. Give the run's configuration with "
                       "--config FILE.json, or --num-heads N")
    check_heads(settings["num_heads"], "model_dim", inferred["model_dim"])
    expect(settings, "use_moe", lambda value: value is False, "false: the mixture of experts is not supported")
    return {"model_type": MODEL_TYPE, **inferred, "num_heads": settings["num_heads"],
            "long_mem_len": settings.get("long_mem_len", 512), "bank": settings.get("bank", True),
            "calls": settings.get("calls", "prompt"), **{key: settings[key] for key in TOKEN_IDS if key in settings}}


def dense(name, into, out):
    return [(name + ".kernel", (into, out), True), (name + ".bias", (out,), True)]


def tensor_specs(config, fused=lambda layer: True):
    """(name, shape, required) of every tensor of the model. fused(layer): W_fused there instead of W_q, W_k, W_v, W_z."""
    v, d = config["vocab_size"], config["model_dim"]
    block = [(norm + ".scale", (d,), True) for norm in ("norm1", "norm2", "norm_recurrence")]
    for name in ("W_gamma", "W_gamma_context"):
        block += dense(name + "_1", d, d // 4) + dense(name + "_2", d // 4, d)
    block += dense("W_g_z", d, d) + dense("W_g_h", d, d) + dense("ffn_dense1", d, 4 * d) + dense("ffn_dense2", 4 * d, d)
    block += [("attn.q_proj.kernel", (d, d), True), ("attn.out_proj.kernel", (d, d), True)]
    separate = [spec for name in ("W_q", "W_k", "W_v", "W_z") for spec in dense(name, d, d)]
    specs = [("shared_embed.embedding", (v, d), True), ("norm_final.scale", (d,), True)]
    for layer in range(config["num_layers"]):
        projections = dense("W_fused", d, 4 * d) if fused(layer) else separate
        specs += [(f"block_{layer}.{name}", shape, required) for name, shape, required in projections + block]
    return specs


def plan(tensors, given, options):
    """(config.json, the tensors to write, the names of the others) of a tree of parameters."""
    moe = next((name for name in tensors if ".moe_ffn." in name), None)
    if moe is not None:
        raise Rejected(f"use_moe: found a mixture of experts (tensor {moe}), expected dense FFNs: it is not supported")
    config = choose_config(infer_config(tensors), given, options)
    specs = tensor_specs(config, lambda layer: f"block_{layer}.W_q.kernel" not in tensors)
    selected, others = select_tensors(tensors, specs)
    refuse_unknown(others, lambda name: ".W_planning_" in name)
    return config, selected, others
