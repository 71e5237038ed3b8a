"""The model `mmrec`: PyTorch's MMRecModel. Sizes and variants follow from the tensors' shapes, all but num_heads."""
import sys

from .common import Rejected, one_line
from .tensors import check_heads, expect, is_plain, layer_count, select_tensors, shape_of

CONFIG_KEYS = ("config", "model_config")
# Keys of config.json that a checkpoint's own configuration may bring along.
KNOWN_CONFIG = {
    "vocab_size", "model_dim", "num_layers", "num_heads", "ffn_dim", "use_hem", "use_dpg", "dpg_rank", "mdi_mix",
    "memory_segment", "memory_slots", "carry_state", "bos_token_id", "eos_token_id", "max_seq_len", "mem_dim",
    "use_sparse"}


def infer_config(tensors):
    """What the shapes say."""
    vocab_size, model_dim = shape_of(tensors, "embedding.weight", 2)
    config = {"vocab_size": vocab_size, "model_dim": model_dim, "num_layers": layer_count(tensors, "blocks."),
              "ffn_dim": shape_of(tensors, "blocks.0.ffn.0.weight", 2)[0],
              "use_hem": "blocks.0.W_fused.weight" in tensors, "use_dpg": "blocks.0.W_gamma_down.weight" in tensors}
    if config["use_dpg"]:
        config["dpg_rank"] = shape_of(tensors, "blocks.0.W_gamma_down.weight", 2)[0]
    return config


def choose_config(inferred, root, given, num_heads):
    """config.json: what the shapes say, then the checkpoint's own configuration, the file given, the option given."""
    config = {"model_type": "mmrec", **inferred}
    own = next((root[key] for key in CONFIG_KEYS if isinstance(root, dict) and isinstance(root.get(key), dict)), {})
    own = {key: value for key, value in own.items() if key in KNOWN_CONFIG and is_plain(value)}
    options = {} if num_heads is None else {"num_heads": num_heads}
    unknown = sorted(set(given) - KNOWN_CONFIG - {"model_type"})
    if unknown:
        print(f"convert.py: note: --config: unknown keys are left out ({one_line(', '.join(unknown[:5]))})", file=sys.stderr)
    given = {key: value for key, value in given.items() if key not in unknown}
    for source, values in (("the checkpoint's configuration", own), ("--config", given), ("--num-heads", options)):
        for key, value in values.items():
            if value is None and key in ("ffn_dim", "mem_dim", "bos_token_id", "eos_token_id"):
                continue
            if key in inferred and (value != inferred[key] or type(value) is not type(inferred[key])):
                raise Rejected(f"{key}: found {value!r} in {source}, expected {inferred[key]!r} by the tensors' shapes")
            config[key] = value
    heads = config.get("num_heads")
    if heads is None:
        raise Rejected("num_heads is not in the checkpoint and no shape tells it. Give it with --num-heads N")
    check_heads(heads, "model_dim", config["model_dim"])
    if config.get("use_sparse", False) is not False:
        raise Rejected("use_sparse: found true, expected false: the sparse variant of the model is not supported")
    if config.get("mem_dim", config["model_dim"]) != config["model_dim"]:
        raise Rejected(f"mem_dim: found {config['mem_dim']!r}, expected model_dim {config['model_dim']}")
    if config["model_type"] != "mmrec":
        raise Rejected(f"model_type: found {config['model_type']!r}, expected 'mmrec'")
    expect(config, "max_seq_len", is_plain, "a number")
    if not config["use_dpg"] and config["model_dim"] % 4:
        raise Rejected(f"embedding.weight: found {config['model_dim']} columns, expected a multiple of 4")
    return config


def linear(name, out, into, required=True):
    return [(name + ".weight", (out, into), required), (name + ".bias", (out,), required)]


def block_specs(d, f, use_hem=False, dpg_rank=None):
    """(name, shape, required) of a block's tensors: width d, FFN width f; with dpg_rank the low-rank decay gate."""
    mdi = dpg_rank is None
    block = [("norm1.weight", (d,), True), ("norm2.weight", (d,), True)]
    if use_hem:
        block += linear("W_fused", 4 * d, d)
    else:
        block += linear("W_q", d, d) + linear("W_k", d, d, mdi) + linear("W_v", d, d) + linear("W_z", d, d)
    for name in ("mdi.W_gamma", "mdi.W_context"):
        block += linear(name + ".0", d // 4, d, mdi) + linear(name + ".2", d, d // 4, mdi)
    if not mdi:
        block += linear("W_gamma_down", dpg_rank, d) + linear("W_gamma_up", d, dpg_rank)
    block += linear("W_g", d, d) + linear("mdi.W_g", d, 2 * d)
    block += linear("multi_mem_attention.W_q", d, d) + linear("multi_mem_attention.W_o", d, d)
    return block + linear("ffn.0", f, d) + linear("ffn.3", d, f)


def tensor_specs(config):
    """(name, shape, required) of every tensor the engine knows for this configuration."""
    d, v = config["model_dim"], config["vocab_size"]
    block = block_specs(d, config["ffn_dim"], config["use_hem"], config["dpg_rank"] if config["use_dpg"] else None)
    specs = [("embedding.weight", (v, d), True), ("norm.weight", (d,), True), ("lm_head.weight", (v, d), False)]
    for layer in range(config["num_layers"]):
        specs += [(f"blocks.{layer}.{name}", shape, required) for name, shape, required in block]
    return specs


def plan(tensors, root, given, options):
    """(config.json, the tensors to write, the names of the others) of a state dict."""
    config = choose_config(infer_config(tensors), root, given, options.num_heads)
    # Rows of W_fused beyond the four projections are kept and unused.
    return (config, *select_tensors(tensors, tensor_specs(config), lambda name: ".W_fused." in name))
