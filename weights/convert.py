#!/usr/bin/env python3
"""Turns a PyTorch checkpoint of MM-Rec into a model folder: config.json, model.safetensors, tokenizer.model.

    convert.py CHECKPOINT.pt --tokenizer tokenizer.model -o FOLDER [--config config.json] [--num-heads N]
               [--dtype keep|f32|bf16|f16] [--max-shard-size 5GB]

Needs Python 3.9 and nothing else. What must stay true:
  * Nothing in the checkpoint is ever executed. Its pickle is interpreted here by a small stack machine that knows the
    few opcodes and names that state dicts are made of; it imports nothing, calls nothing and refuses the rest by name.
  * The folder appears whole or not at all: it is written beside its place under another name, then renamed.
Exit codes: 0 done, 2 usage, 3 input rejected, 4 out of memory, 5 cannot write. An error is one line on stderr.
"""
import argparse
import array
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import zipfile

MAX_PICKLE_BYTES = 64 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 8

# Storage class -> (safetensors dtype, bytes per element). Only the first three can be weights.
STORAGES = {
    "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8), "LongStorage": ("I64", 8), "IntStorage": ("I32", 4), "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1),
}
WEIGHT_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
STATE_DICT_KEYS = ("model_state_dict", "state_dict", "model")
CONFIG_KEYS = ("config", "model_config")
PREFIXES = ("module.", "_orig_mod.")
# Keys of config.json that a checkpoint's own configuration may bring along.
KNOWN_CONFIG = {
    "vocab_size", "model_dim", "num_layers", "num_heads", "ffn_dim", "use_hem", "use_dpg", "dpg_rank", "mdi_mix",
    "memory_segment", "memory_slots", "carry_state", "bos_token_id", "eos_token_id", "max_seq_len", "mem_dim",
    "use_sparse"}


class Rejected(Exception):
    """The input is not a checkpoint that can be converted."""


class CannotWrite(Exception):
    """The output cannot be written."""


# ----------------------------------------------------------------------------------------------------------------------
# The pickle: symbols, storages and tensors instead of objects

class Global:
    """A name in the pickle. It stands for itself; what it names is never looked up."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __str__(self):
        return f"{self.module}.{self.name}"


class Storage:
    def __init__(self, dtype, key, elements):
        self.dtype, self.key, self.elements = dtype, key, elements


class Tensor:
    """A view of a storage: element i is at offset + sum(i_d * stride_d)."""

    def __init__(self, storage, offset, shape, stride):
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride
        self.elements = math.prod(shape)

    @property
    def dtype(self):
        return self.storage.dtype


def is_sizes(value):
    return (isinstance(value, tuple) and len(value) <= MAX_RANK
            and all(type(n) is int and 0 <= n < 1 << 63 for n in value))


def rebuild_tensor(arguments):
    if len(arguments) < 4:
        raise Rejected("a tensor has fewer than 4 arguments")
    storage, offset, shape, stride = arguments[:4]
    if not (isinstance(storage, Storage) and type(offset) is int and offset >= 0 and is_sizes(shape)
            and is_sizes(stride) and len(shape) == len(stride)):
        raise Rejected("a tensor's storage, offset, shape or stride is malformed")
    tensor = Tensor(storage, offset, shape, stride)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride))
    if tensor.elements > 0 and last >= storage.elements:
        raise Rejected(f"a tensor of shape {list(shape)} reaches element {last} of a storage of {storage.elements}")
    if tensor.elements > storage.elements:
        raise Rejected(f"a tensor of shape {list(shape)} has more elements than its storage ({storage.elements})")
    return tensor


def rebuild_parameter(arguments):
    if not arguments or not isinstance(arguments[0], Tensor):
        raise Rejected("a parameter is not made of a tensor")
    return arguments[0]


def rebuild_ordered_dict(arguments):
    if arguments:  # torch.save makes an empty one and sets its items
        raise Rejected("an OrderedDict is made with arguments")
    return {}


REBUILDERS = {
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("collections", "OrderedDict"): rebuild_ordered_dict,
}


def checked_key(key):
    if isinstance(key, (str, int, float, type(None))):
        return key
    raise Rejected("a dictionary has a key that is neither text nor a number")


class PickleReader:
    """Interprets a pickle. Opcodes that state dicts do not need, and names beyond REBUILDERS and STORAGES, are refused."""

    def __init__(self, data):
        self.data, self.at = data, 0
        self.stack, self.marks, self.memo = [], [], {}

    def read(self):
        while True:
            opcode = self.take(1)[0]
            if opcode == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise Rejected("malformed pickle: STOP with values left over")
                return self.stack[0]
            handler = self.HANDLERS.get(opcode)
            if handler is None:
                raise Rejected(f"pickle opcode {bytes([opcode])!r} at byte {self.at - 1} is not part of a state dict")
            handler(self)

    def take(self, count):
        if count > len(self.data) - self.at:
            raise Rejected(f"malformed pickle: ends within a value at byte {self.at}")
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def line(self):
        end = self.data.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise Rejected("malformed pickle: a name without an end")
        text = self.decode(self.take(end - self.at))
        self.take(1)
        return text

    @staticmethod
    def decode(data):
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise Rejected("malformed pickle: text that is not UTF-8") from None

    def push(self, value):
        self.stack.append(value)

    def pop(self, count=1):
        """The topmost `count` values, the lowest first."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) - count < floor:
            raise Rejected("malformed pickle: too few values on the stack")
        values = self.stack[len(self.stack) - count:]
        del self.stack[len(self.stack) - count:]
        return values

    def pop_mark(self):
        if not self.marks:
            raise Rejected("malformed pickle: no mark")
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def top(self, kind):
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor or not isinstance(self.stack[-1], kind):
            raise Rejected(f"malformed pickle: expected a {kind.__name__}")
        return self.stack[-1]

    def get(self, index):
        if index not in self.memo:
            raise Rejected("malformed pickle: refers to a value that was not stored")
        self.push(self.memo[index])

    def put(self, index):
        self.memo[index] = self.top(object)

    def set_items(self, values):
        if len(values) % 2:
            raise Rejected("malformed pickle: a key without a value")
        target = self.top(dict)
        for key, value in zip(values[::2], values[1::2]):
            target[checked_key(key)] = value

    def global_name(self, module, name):
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Rejected("malformed pickle: a name that is not text")
        if (module, name) not in REBUILDERS and not (module == "torch" and name in STORAGES):
            raise Rejected(f"needs {module}.{name}, which a state dict does not; it was not loaded. "
                           "Save the state dict alone: torch.save(model.state_dict(), FILE)")
        self.push(Global(module, name))

    def reduce(self):
        function, arguments = self.pop(2)
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Rejected("malformed pickle: calls something that is not a name")
        rebuild = REBUILDERS.get((function.module, function.name))
        if rebuild is None:
            raise Rejected(f"calls {function}, which a state dict does not; it was not called")
        self.push(rebuild(arguments))

    def build(self):
        self.pop()  # attributes of a state dict (its _metadata): not needed
        self.top(dict)

    def persistent_id(self):
        (pid,) = self.pop()
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Global)
                and pid[1].module == "torch" and isinstance(pid[2], str) and re.fullmatch(r"[0-9]{1,12}", pid[2])
                and type(pid[4]) is int and 0 <= pid[4] < 1 << 48):
            raise Rejected("a storage is malformed")
        self.push(Storage(STORAGES[pid[1].name], pid[2], pid[4]))

    def long(self, count):
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    HANDLERS = {
        0x80: lambda r: r.take(1),                                      # PROTO
        0x95: lambda r: r.take(8),                                      # FRAME
        0x28: lambda r: r.marks.append(len(r.stack)),                   # MARK
        0x7D: lambda r: r.push({}),                                     # EMPTY_DICT
        0x5D: lambda r: r.push([]),                                     # EMPTY_LIST
        0x29: lambda r: r.push(()),                                     # EMPTY_TUPLE
        0x74: lambda r: r.push(tuple(r.pop_mark())),                    # TUPLE
        0x85: lambda r: r.push(tuple(r.pop(1))),                        # TUPLE1
        0x86: lambda r: r.push(tuple(r.pop(2))),                        # TUPLE2
        0x87: lambda r: r.push(tuple(r.pop(3))),                        # TUPLE3
        0x4E: lambda r: r.push(None),                                   # NONE
        0x88: lambda r: r.push(True),                                   # NEWTRUE
        0x89: lambda r: r.push(False),                                  # NEWFALSE
        0x4B: lambda r: r.push(r.number("B")),                          # BININT1
        0x4D: lambda r: r.push(r.number("H")),                          # BININT2
        0x4A: lambda r: r.push(r.number("i")),                          # BININT
        0x8A: lambda r: r.long(r.number("B")),                          # LONG1
        0x47: lambda r: r.push(struct.unpack(">d", r.take(8))[0]),      # BINFLOAT
        0x58: lambda r: r.push(r.decode(r.take(r.number("I")))),        # BINUNICODE
        0x8C: lambda r: r.push(r.decode(r.take(r.number("B")))),        # SHORT_BINUNICODE
        0x71: lambda r: r.put(r.number("B")),                           # BINPUT
        0x72: lambda r: r.put(r.number("I")),                           # LONG_BINPUT
        0x94: lambda r: r.put(len(r.memo)),                             # MEMOIZE
        0x68: lambda r: r.get(r.number("B")),                           # BINGET
        0x6A: lambda r: r.get(r.number("I")),                           # LONG_BINGET
        0x63: lambda r: r.global_name(r.line(), r.line()),              # GLOBAL
        0x93: lambda r: r.global_name(*r.pop(2)),                       # STACK_GLOBAL
        0x52: lambda r: r.reduce(),                                     # REDUCE
        0x62: lambda r: r.build(),                                      # BUILD
        0x51: lambda r: r.persistent_id(),                              # BINPERSID
        0x61: lambda r: r.append_items(r.pop(1)),                       # APPEND
        0x65: lambda r: r.append_items(r.pop_mark()),                   # APPENDS
        0x73: lambda r: r.set_items(r.pop(2)),                          # SETITEM
        0x75: lambda r: r.set_items(r.pop_mark()),                      # SETITEMS
    }

    def append_items(self, values):
        self.top(list).extend(values)


# ----------------------------------------------------------------------------------------------------------------------
# The archive

class Archive:
    """The zip file that torch.save writes: NAME/data.pkl, and NAME/data/KEY for each storage, all uncompressed."""

    def __init__(self, path):
        self.size = os.stat(path).st_size
        with open(path, "rb") as file:
            start = file.read(64)
        check_start(start)
        try:
            self.zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
            raise Rejected(f"not a PyTorch checkpoint, or cut short ({one_line(error)})") from None
        self.entries = {entry.filename: entry for entry in self.zip.infolist()}
        pickles = [name for name in self.entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Rejected(f"not a PyTorch checkpoint: found {len(pickles)} files data.pkl in it, expected 1")
        self.root = pickles[0][:-len("data.pkl")]
        if self.read_if_there("byteorder", 16) == b"big":
            raise Rejected("written on a big-endian machine (found byteorder big, expected little)")
        self.cached = (None, b"")

    def read(self, name, limit):
        entry = self.entries[self.root + name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Rejected(f"{name}: is compressed or encrypted, which torch.save does not do")
        if entry.file_size > min(limit, self.size) or entry.compress_size != entry.file_size:
            raise Rejected(f"{name}: found {entry.file_size} bytes, expected at most {min(limit, self.size)}")
        try:
            data = self.zip.read(entry)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, OSError, ValueError) as error:
            raise Rejected(f"{name}: damaged ({one_line(error)})") from None
        if len(data) != entry.file_size:
            raise Rejected(f"{name}: found {len(data)} bytes, expected {entry.file_size}")
        return data

    def read_if_there(self, name, limit):
        return self.read(name, limit) if self.root + name in self.entries else None

    def storage(self, storage):
        """The bytes of a storage; the last one is kept, because tensors may share it."""
        key = (storage.key, storage.dtype)
        if self.cached[0] != key:
            name = "data/" + storage.key
            if self.root + name not in self.entries:
                raise Rejected(f"{name}: storage is missing")
            data = self.read(name, self.size)
            expected = storage.elements * storage.dtype[1]
            if len(data) < expected:
                raise Rejected(f"{name}: found {len(data)} bytes, expected {expected}")
            self.cached = (key, data)
        return self.cached[1]

    def tensor(self, tensor):
        """A tensor's elements in row-major order."""
        size = tensor.dtype[1]
        data = self.storage(tensor.storage)
        if is_contiguous(tensor):
            return data[tensor.offset * size:(tensor.offset + tensor.elements) * size]
        elements = array.array({2: "H", 4: "I"}[size])
        whole = len(data) // size * size
        elements.frombytes(data[:whole])
        out = array.array(elements.typecode)
        gather(elements, tensor.offset, tensor.shape, tensor.stride, out)
        return out.tobytes()


def is_contiguous(tensor):
    expected = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if extent != 1 and stride != expected:
            return tensor.elements == 0
        expected *= extent
    return True


def gather(elements, offset, shape, stride, out):
    if not shape:
        out.append(elements[offset])
    elif len(shape) == 1:
        step = stride[0]
        if step == 0:
            out.extend([elements[offset]] * shape[0])
        elif shape[0]:
            out.extend(elements[offset:offset + (shape[0] - 1) * step + 1:step])
    else:
        for i in range(shape[0]):
            gather(elements, offset + i * stride[0], shape[1:], stride[1:], out)


def check_start(start):
    if start.startswith(b"PK\x03\x04"):
        return
    if start.startswith(LEGACY_MAGIC) or b"ustar" in start:
        raise Rejected("written in PyTorch's format from before 1.6, which only PyTorch can read safely. "
                       "Re-save it with a current one: torch.save(torch.load(FILE, weights_only=True), NEW_FILE)")
    if start.startswith(b"version https://git-lfs"):
        raise Rejected("looks like a Git LFS pointer: fetch the file itself with `git lfs pull`")
    if start.lstrip()[:1] == b"<":
        raise Rejected("looks like a web page: download the file itself")
    if start[8:9] == b"{":
        raise Rejected("looks like a safetensors file, which needs no conversion")
    raise Rejected("not a PyTorch checkpoint (found no zip archive)")


def one_line(error):
    """A message, or text from a file, as one line without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:1000])


# ----------------------------------------------------------------------------------------------------------------------
# The model

def find_state_dict(root):
    if not isinstance(root, dict):
        raise Rejected("not a state dict (expected a dictionary of tensors)")
    for key in STATE_DICT_KEYS:
        if isinstance(root.get(key), dict):
            return root[key]
    return root


def strip_prefixes(state):
    """The tensors by their names in the public class: wrappers (DataParallel, torch.compile) put prefixes before them."""
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            continue
        full = name
        while name.startswith(PREFIXES):
            name = name[len(next(p for p in PREFIXES if name.startswith(p))):]
        if name in tensors:
            raise Rejected(f"{full}: names the same tensor as another entry")
        tensors[name] = tensor
    return tensors


def shape_of(tensors, name, rank):
    if name not in tensors:
        raise Rejected(f"{name}: tensor is missing (is this a checkpoint of MM-Rec?)")
    shape = tensors[name].shape
    if len(shape) != rank or 0 in shape:
        raise Rejected(f"{name}: found shape {list(shape)}, expected {rank} dimensions of at least 1")
    return shape


def infer_config(tensors):
    """What the shapes say."""
    vocab_size, model_dim = shape_of(tensors, "embedding.weight", 2)
    layers = {int(m.group(1)) for m in (re.match(r"blocks\.(0|[1-9][0-9]{0,5})\.", name) for name in tensors) if m}
    if layers != set(range(len(layers))) or not layers:
        raise Rejected(f"blocks: found numbers {sorted(layers)[:8]}, expected 0, 1, 2, ...")
    config = {"vocab_size": vocab_size, "model_dim": model_dim, "num_layers": len(layers),
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
    if type(heads) is not int or heads < 1 or config["model_dim"] % heads:
        raise Rejected(f"num_heads: found {heads!r}, expected a divisor of model_dim {config['model_dim']}")
    if config.get("use_sparse", False) is not False:
        raise Rejected("use_sparse: found true, expected false: the sparse variant of the model is not supported")
    if config.get("mem_dim", config["model_dim"]) != config["model_dim"]:
        raise Rejected(f"mem_dim: found {config['mem_dim']!r}, expected model_dim {config['model_dim']}")
    if config["model_type"] != "mmrec":
        raise Rejected(f"model_type: found {config['model_type']!r}, expected 'mmrec'")
    return config


def is_plain(value):
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (bool, int, str, type(None))) or (
        isinstance(value, list) and all(type(item) is int for item in value))


def tensor_specs(config):
    """(name, shape, required) of every tensor the engine knows for this configuration."""
    d, f, v = config["model_dim"], config["ffn_dim"], config["vocab_size"]
    dpg = config["use_dpg"]

    def linear(name, out, into, required=True):
        return [(name + ".weight", (out, into), required), (name + ".bias", (out,), required)]

    specs = [("embedding.weight", (v, d), True), ("norm.weight", (d,), True), ("lm_head.weight", (v, d), False)]
    for layer in range(config["num_layers"]):
        block = [("norm1.weight", (d,), True), ("norm2.weight", (d,), True)]
        if config["use_hem"]:
            block += linear("W_fused", 4 * d, d)
        else:
            block += linear("W_q", d, d) + linear("W_k", d, d, not dpg) + linear("W_v", d, d) + linear("W_z", d, d)
        for name in ("mdi.W_gamma", "mdi.W_context"):
            block += linear(name + ".0", d // 4, d, not dpg) + linear(name + ".2", d, d // 4, not dpg)
        if dpg:
            block += linear("W_gamma_down", config["dpg_rank"], d) + linear("W_gamma_up", d, config["dpg_rank"])
        block += linear("W_g", d, d) + linear("mdi.W_g", d, 2 * d)
        block += linear("multi_mem_attention.W_q", d, d) + linear("multi_mem_attention.W_o", d, d)
        block += linear("ffn.0", f, d) + linear("ffn.3", d, f)
        specs += [(f"blocks.{layer}.{name}", shape, required) for name, shape, required in block]
    return specs


def select_tensors(tensors, config):
    """The tensors to write, by name; the others' names."""
    selected = {}
    for name, shape, required in tensor_specs(config):
        tensor = tensors.get(name)
        if tensor is None:
            if required:
                raise Rejected(f"{name}: tensor is missing (expected shape {list(shape)})")
            continue
        found = tensor.shape
        if ".W_fused." in name and len(found) == len(shape) and found[0] > shape[0]:
            found = (shape[0],) + found[1:]  # rows beyond the four projections are kept and unused
        if found != shape:
            raise Rejected(f"{name}: found shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype[0] not in WEIGHT_DTYPES:
            raise Rejected(f"{name}: found {tensor.dtype[0]}, expected F32, F16 or BF16")
        selected[name] = tensor
    return selected, sorted(set(tensors) - set(selected))


# ----------------------------------------------------------------------------------------------------------------------
# Conversion of numbers

def to_f32(data, dtype):
    if dtype == "F32":
        return data
    if dtype == "BF16":  # the upper halves
        out = bytearray(2 * len(data))
        out[2::4] = data[0::2]
        out[3::4] = data[1::2]
        return bytes(out)
    count = len(data) // 2
    return struct.pack(f"<{count}f", *struct.unpack(f"<{count}e", data))


def from_f32(data, dtype, name):
    """Rounds to nearest even. A finite number that would become infinite is refused."""
    count = len(data) // 4
    if dtype == "F32":
        return data
    if dtype == "F16":
        values = struct.unpack(f"<{count}f", data)
        try:
            return struct.pack(f"<{count}e", *values)
        except OverflowError:
            index = next(i for i, x in enumerate(values) if math.isfinite(x) and abs(x) >= 65520)
            raise Rejected(f"{name}: element {index} is {values[index]:g}, too large for F16") from None
    out = array.array("H", bytes(2 * count))
    for i, bits in enumerate(struct.unpack(f"<{count}I", data)):
        if bits & 0x7FFFFFFF > 0x7F800000:
            out[i] = (bits >> 16) | 0x40  # NaN stays NaN
        else:
            out[i] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            if out[i] & 0x7FFF == 0x7F80 and bits & 0x7FFFFFFF != 0x7F800000:
                raise Rejected(f"{name}: element {i} is too large for BF16")
    if sys.byteorder == "big":
        out.byteswap()
    return out.tobytes()


def converted(data, from_dtype, to_dtype, name):
    if from_dtype == to_dtype:
        return data
    step = 1 << 20  # elements: bounds the memory that Python's numbers take
    size = WEIGHT_DTYPES[from_dtype]
    return b"".join(from_f32(to_f32(data[i:i + step * size], from_dtype), to_dtype, name)
                    for i in range(0, len(data), step * size))


# ----------------------------------------------------------------------------------------------------------------------
# The folder

def shards_of(selected, dtype, max_bytes):
    """Lists of names that share a file, in the order of names."""
    shards, used = [[]], 0
    for name in sorted(selected):
        size = selected[name].elements * WEIGHT_DTYPES[dtype or selected[name].dtype[0]]
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def write_shard(path, names, selected, dtype, archive):
    """Writes one safetensors file; returns the bytes of its tensors."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        kind = dtype or selected[name].dtype[0]
        begin, end = end, end + selected[name].elements * WEIGHT_DTYPES[kind]
        header[name] = {"dtype": kind, "shape": list(selected[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = selected[name]
            file.write(converted(archive.tensor(tensor), tensor.dtype[0], dtype or tensor.dtype[0], name))
        sync(file)
    return end


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def sync(file):
    file.flush()
    os.fsync(file.fileno())


def write_folder(folder, config, selected, dtype, archive, tokenizer, max_bytes):
    folder = os.path.abspath(folder)
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise CannotWrite(f"{folder}: exists and is not an empty folder")
    # A signal between the making of the folder and the try would leave the folder behind.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        temporary = tempfile.mkdtemp(prefix="." + os.path.basename(folder) + ".", dir=os.path.dirname(folder))
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        shards = shards_of(selected, dtype, max_bytes)
        if len(shards) == 1:
            write_shard(os.path.join(temporary, "model.safetensors"), shards[0], selected, dtype, archive)
        else:
            total, weight_map = 0, {}
            for i, names in enumerate(shards):
                shard = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                total += write_shard(os.path.join(temporary, shard), names, selected, dtype, archive)
                weight_map.update(dict.fromkeys(names, shard))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text(os.path.join(temporary, "model.safetensors.index.json"), json.dumps(index, indent=2) + "\n")
        write_text(os.path.join(temporary, "config.json"), json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            with open(os.path.join(temporary, "tokenizer.model"), "wb") as file:
                file.write(tokenizer)
                sync(file)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o777 & ~mask)  # mkdtemp made it private
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# ----------------------------------------------------------------------------------------------------------------------
# The command

def read_json(path):
    def no_duplicates(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    if os.stat(path).st_size > MAX_CONFIG_BYTES:
        raise Rejected(f"{path}: file is too large")
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{path}: not JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise Rejected(f"{path}: expected a JSON object")
    return value


def parse_size(text):
    match = re.fullmatch(r"([0-9]{1,15})(|KB|MB|GB)", text)
    if not match or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"invalid size '{text}' (expected a number of bytes, KB, MB or GB)")
    return int(match.group(1)) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match.group(2)]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. Try: {self.prog} --help\n")


def parse_arguments(arguments):
    parser = Parser(prog="convert.py", allow_abbrev=False,
                    description="Turns a PyTorch checkpoint of MM-Rec into a model folder. Nothing in it is executed.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT.pt", help="a state dict, or a dictionary with model_state_dict")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="must not exist, or be empty")
    parser.add_argument("--tokenizer", metavar="FILE", help="sentencepiece model to copy to tokenizer.model")
    parser.add_argument("--config", metavar="FILE", help="config.json with what the checkpoint does not tell")
    parser.add_argument("--num-heads", metavar="N", type=int, help="attention heads, where the checkpoint does not say")
    parser.add_argument("--dtype", choices=["keep", "f32", "bf16", "f16"], default="keep", help="default: keep")
    parser.add_argument("--max-shard-size", metavar="SIZE", type=parse_size, default="5GB", help="default: 5GB")
    return parser.parse_args(arguments)


def convert(options):
    if not os.path.isfile(options.checkpoint):
        raise Rejected("no such file" if not os.path.exists(options.checkpoint) else "not a regular file")
    archive = Archive(options.checkpoint)
    root = PickleReader(archive.read("data.pkl", MAX_PICKLE_BYTES)).read()
    tensors = strip_prefixes(find_state_dict(root))
    given = read_json(options.config) if options.config else {}
    config = choose_config(infer_config(tensors), root, given, options.num_heads)
    selected, others = select_tensors(tensors, config)
    if others:
        shown = one_line(", ".join(others[:3])) + (", ..." if len(others) > 3 else "")
        print(f"convert.py: note: {len(others)} tensors that inference does not use are left out ({shown})",
              file=sys.stderr)
    tokenizer = None
    if options.tokenizer:
        with open(options.tokenizer, "rb") as file:
            tokenizer = file.read()
    else:
        print("convert.py: note: without --tokenizer the folder has none", file=sys.stderr)
    dtype = None if options.dtype == "keep" else options.dtype.upper()
    try:
        write_folder(options.output, config, selected, dtype, archive, tokenizer, options.max_shard_size)
    except OSError as error:
        raise CannotWrite(f"{options.output}: {error.strerror or one_line(error)}") from None
    bytes_of = sum(t.elements * WEIGHT_DTYPES[dtype or t.dtype[0]] for t in selected.values())
    print(f"convert.py: {options.output}: {len(selected)} tensors, {bytes_of} bytes", file=sys.stderr)


def main(arguments):
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that nothing half-written stays
    try:
        convert(options)
        return 0
    except Rejected as error:
        print(f"convert.py: {options.checkpoint}: {one_line(error)}", file=sys.stderr)
        return 3
    except CannotWrite as error:
        print(f"convert.py: {one_line(error)}", file=sys.stderr)
        return 5
    except OSError as error:
        print(f"convert.py: {error.filename or options.checkpoint}: {error.strerror or one_line(error)}", file=sys.stderr)
        return 3
    except MemoryError:
        print(f"convert.py: {options.checkpoint}: not enough memory", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
