"""Float64 reference of the MM-Rec equations, and the generator of tests/fixtures/oracle/.

The public code's own tensors (tests/fixtures/upstream/) cover one memory slot, mu = 0.1 and fp32 weights. This script
covers the rest: several slots, a state carried over or restarted at segments, mu = 0, segments longer than a row tile,
half-precision weights. It follows docs/numerics.md position by position, without any of the engine's parallel forms.

usage: make_oracle.py OUTPUT_FOLDER        writes one model folder with reference.safetensors per case (needs NumPy)
       make_oracle.py --check FOLDER...    compares folders that already hold a reference.safetensors
"""
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

ERF = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def gelu(x):
    return 0.5 * x * (1 + ERF(x / math.sqrt(2)))


def rmsnorm(x, weight):
    return weight * x / (np.sqrt((x * x).sum()) / math.sqrt(x.size) + 1e-6)


class Block:
    """One block of one sequence, fed token by token."""

    def __init__(self, config, weights, index):
        self.c, self.w, self.p = config, weights, f"blocks.{index}."
        self.h = np.zeros(config["model_dim"])
        self.slots, self.outputs = [], []

    def linear(self, name, x):
        return self.w[f"{self.p}{name}.weight"] @ x + self.w[f"{self.p}{name}.bias"]

    def decay(self, z, k):
        if self.c.get("use_dpg"):
            gamma = sigmoid(self.linear("W_gamma_up", np.maximum(self.linear("W_gamma_down", z), 0)))
        else:
            gamma = sigmoid(self.linear("mdi.W_gamma.2", gelu(self.linear("mdi.W_gamma.0", z))))
            gamma = gamma * sigmoid(self.linear("mdi.W_context.2", gelu(self.linear("mdi.W_context.0", k))))
        return np.clip(gamma, 1e-6, 1 - 1e-6)

    def attend(self, query):
        heads = self.c["num_heads"]
        size = query.size // heads
        out = np.zeros_like(query)
        for i in range(heads):
            part = slice(i * size, (i + 1) * size)
            scores = np.array([query[part] @ slot[part] for slot in self.slots]) / math.sqrt(size)
            share = np.exp(scores - scores.max())
            share /= share.sum()
            out[part] = sum(s * slot[part] for s, slot in zip(share, self.slots))
        return out

    def step(self, x):
        dim, mix = self.c["model_dim"], self.c.get("mdi_mix", 0.1)
        if not self.outputs and not self.c.get("carry_state", True):
            self.h = np.zeros(dim)
        u = rmsnorm(x, self.w[self.p + "norm1.weight"])
        if self.c.get("use_hem"):
            q, k, v, z = np.split(self.linear("W_fused", u)[: 4 * dim], 4)
        else:
            q, k, v, z = (self.linear("W_" + name, u) for name in "qkvz")
        gamma = self.decay(z, k)
        s = sigmoid(self.linear("W_g", self.h))
        g = sigmoid(self.linear("mdi.W_g", np.concatenate([z, self.h])))
        self.h = (gamma + mix * (1 - g + gamma)) * self.h + z * (s + mix * g)
        context = np.zeros(dim)
        if self.slots:
            context = self.attend(self.linear("multi_mem_attention.W_q", self.h) + 0.5 * q)
        y = x + self.h + self.linear("multi_mem_attention.W_o", context) + 0.1 * v
        y = y + self.linear("ffn.3", gelu(self.linear("ffn.0", rmsnorm(y, self.w[self.p + "norm2.weight"]))))
        self.outputs.append(y)
        if len(self.outputs) == self.c.get("memory_segment", 8192):
            self.slots = (self.slots + [np.mean(self.outputs, axis=0)])[-self.c.get("memory_slots", 1):]
            self.outputs = []
        return y


def forward(config, weights, tokens):
    """Logits [T, V] of one sequence."""
    blocks = [Block(config, weights, i) for i in range(config["num_layers"])]
    head = weights.get("lm_head.weight", weights["embedding.weight"])
    logits = []
    for token in tokens:
        x = weights["embedding.weight"][token]
        for block in blocks:
            x = block.step(x)
        logits.append(head @ rmsnorm(x, weights["norm.weight"]))
    return np.array(logits)


def logprobs_of(logits, tokens):
    """[T - 1]: of token t + 1 given 0..t."""
    top = logits.max(-1, keepdims=True)
    normalised = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.array([normalised[t, tokens[t + 1]] for t in range(len(tokens) - 1)])


def read_safetensors(path):
    raw = Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    tensors = {}
    for name, info in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        data = raw[8 + size + begin : 8 + size + end]
        if info["dtype"] == "BF16":
            array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "I32": "<i4"}[info["dtype"]])
        tensors[name] = array.reshape(info["shape"])
    return tensors


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, array); BF16 arrays hold their bits as uint16."""
    header, offset, parts = {}, 0, []
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def to_bf16_bits(x):
    u = x.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def random_weights(config, rng):
    dim, ffn, vocab = config["model_dim"], config["ffn_dim"], config["vocab_size"]
    shapes = {"embedding": (vocab, dim)}
    if config.pop("untied", False):
        shapes["lm_head"] = (vocab, dim)
    for i in range(config["num_layers"]):
        p = f"blocks.{i}."
        if config.get("use_hem"):
            shapes[p + "W_fused"] = (4 * dim + 8, dim)
        else:
            shapes.update({p + "W_" + name: (dim, dim) for name in "qkvz"})
        shapes[p + "W_g"] = (dim, dim)
        if config.get("use_dpg"):
            rank = config["dpg_rank"]
            shapes.update({p + "W_gamma_down": (rank, dim), p + "W_gamma_up": (dim, rank)})
        else:
            for name in ("W_gamma", "W_context"):
                shapes.update({f"{p}mdi.{name}.0": (dim // 4, dim), f"{p}mdi.{name}.2": (dim, dim // 4)})
        shapes[p + "mdi.W_g"] = (dim, 2 * dim)
        shapes.update({p + "multi_mem_attention.W_q": (dim, dim), p + "multi_mem_attention.W_o": (dim, dim)})
        shapes.update({p + "ffn.0": (ffn, dim), p + "ffn.3": (dim, ffn)})
    weights = {}
    for name, shape in shapes.items():
        scale = 0.7 if name in ("embedding", "lm_head") else 1.5 / math.sqrt(shape[1])
        weights[name + ".weight"] = rng.normal(0, scale, shape)
        if name not in ("embedding", "lm_head"):
            weights[name + ".bias"] = rng.normal(0, 0.3, shape[0])
    for name in ["norm"] + [f"blocks.{i}.norm{j}" for i in range(config["num_layers"]) for j in (1, 2)]:
        weights[name + ".weight"] = 1 + rng.normal(0, 0.2, dim)
    return weights


SMALL = {"model_type": "mmrec", "vocab_size": 48, "model_dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 40}
CASES = {
    # name: (configuration, tokens, batch, storage type)
    "slots": ({"memory_segment": 16, "memory_slots": 3}, 120, 2, "F32"),
    "restart": ({"memory_segment": 20, "memory_slots": 2, "carry_state": False}, 90, 1, "F32"),
    "core": ({"mdi_mix": 0.0, "untied": True}, 80, 1, "F32"),
    "tiles": ({"memory_segment": 300, "memory_slots": 4}, 700, 1, "F32"),
    "dpg_bf16": ({"use_dpg": True, "dpg_rank": 6, "memory_segment": 32, "memory_slots": 2}, 100, 1, "BF16"),
    "hem_f16": ({"use_hem": True, "num_heads": 4, "memory_segment": 40, "memory_slots": 5}, 150, 2, "F16"),
}


def write_case(folder, name, seed):
    extra, length, batch, dtype = CASES[name]
    config = {**SMALL, **extra}
    rng = np.random.default_rng(seed)
    stored = {}
    for key, value in random_weights(config, rng).items():
        if dtype == "BF16":
            stored[key] = (dtype, to_bf16_bits(value))
        else:
            stored[key] = (dtype, value.astype({"F32": np.float32, "F16": np.float16}[dtype]))
    folder = Path(folder) / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(folder / "model.safetensors", stored)
    weights = {k: v.astype(np.float64) for k, v in read_safetensors(folder / "model.safetensors").items()}
    tokens = rng.integers(0, config["vocab_size"], (batch, length)).astype(np.int32)
    logits = np.stack([forward(config, weights, row) for row in tokens])
    logprobs = np.stack([logprobs_of(l, row) for l, row in zip(logits, tokens)])
    write_safetensors(folder / "reference.safetensors", {
        "input_ids": ("I32", tokens),
        "logits": ("F32", logits.astype(np.float32)),
        "logprobs": ("F32", logprobs.astype(np.float32)),
    })


def check(folder):
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.astype(np.float64) for k, v in read_safetensors(folder / "model.safetensors").items()}
    reference = read_safetensors(folder / "reference.safetensors")
    worst = 0.0
    for tokens, expected in zip(reference["input_ids"], reference["logits"]):
        worst = max(worst, np.abs(forward(config, weights, tokens) - expected).max())
    print(f"{folder.name}: largest logit difference {worst:.2e}")
    return worst


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"] and len(sys.argv) > 2:
        sys.exit(0 if max(check(f) for f in sys.argv[2:]) < 5e-5 else 1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    for number, case in enumerate(CASES):
        write_case(sys.argv[1], case, seed=1000 + number)
