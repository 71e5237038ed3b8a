"""What the tests of the converter share: checkpoints put together byte by byte, and a case that runs the script."""
import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import pickle
import pickletools
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "weights/convert.py"
UPSTREAM = ROOT / "tests/fixtures/upstream"

sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPT.parent))

import convert  # noqa: E402
from conversion import mmrec  # noqa: E402
from conversion.pickle_reader import PickleReader  # noqa: E402


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    body = data[8 + length:]
    return {name: (e["dtype"], e["shape"], body[e["data_offsets"][0]:e["data_offsets"][1]])
            for name, e in header.items() if name != "__metadata__"}


def errors_of(stderr):
    return [line for line in stderr.splitlines() if " note: " not in line]


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints put together opcode by opcode, as torch.save writes them

class Raw(bytes):
    """Opcodes that push one value."""


def op(value):
    if isinstance(value, Raw):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(op(v) for v in value) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(op(v) for v in value) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(op(k) + op(v) for k, v in value.items()) + b"u"
    return pickletools.optimize(pickle.dumps(value, protocol=2))[2:-1]  # without what begins and ends a pickle


def name(module, attribute):
    return Raw(f"c{module}\n{attribute}\n".encode())


def call(function, *arguments):
    return Raw(function + op(arguments) + b"R")


def storage(key, elements, kind="FloatStorage"):
    return Raw(op(("storage", name("torch", kind), key, "cpu", elements)) + b"Q")


def strides(shape):
    out, step = [], 1
    for extent in reversed(shape):
        out.insert(0, step)
        step *= extent
    return tuple(out)


def tensor(key, shape, elements=None, offset=0, stride=None, kind="FloatStorage"):
    count = math.prod(shape)
    return call(name("torch._utils", "_rebuild_tensor_v2"), storage(key, count if elements is None else elements, kind),
                offset, tuple(shape), strides(shape) if stride is None else stride, False,
                call(name("collections", "OrderedDict")))


CONFIG = {"vocab_size": 6, "model_dim": 8, "num_layers": 1, "ffn_dim": 12, "use_hem": False, "use_dpg": False}


def tiny_model(**config):
    """{name: (shape, [floats])} of every tensor of a tiny model."""
    return with_values(mmrec.tensor_specs({**CONFIG, **config}))


def with_values(specs):
    """{name: (shape, [floats])} of (name, shape, ...)."""
    model, value = {}, 0.0
    for tensor_name, shape, _ in specs:
        model[tensor_name] = (shape, [value + i / 1024 for i in range(math.prod(shape))])
        value += 0.125
    return model


def stored(model):
    """The tensors of a model as read_safetensors() has them."""
    return {k: ("F32", list(shape), struct.pack(f"<{len(values)}f", *values)) for k, (shape, values) in model.items()}


def state_and_storages(model):
    """The opcodes of a state dict and its storages, one for each tensor."""
    state, storages = {}, {}
    for i, (tensor_name, (shape, values)) in enumerate(model.items()):
        state[tensor_name] = tensor(str(i), shape)
        storages[str(i)] = struct.pack(f"<{len(values)}f", *values)
    return state, storages


def archive_bytes(root, storages, path, extra=(), compression=zipfile.ZIP_STORED):
    data = root if isinstance(root, bytes) and not isinstance(root, Raw) else b"\x80\x02" + op(root) + b"."
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("model/data.pkl", data)
        archive.writestr("model/byteorder", "little")
        for key, content in storages.items():
            archive.writestr(f"model/data/{key}", content)
        for key, content in extra:
            archive.writestr(key, content)


# ----------------------------------------------------------------------------------------------------------------------
# msgpack, as Flax writes it

class Packed(bytes):
    """One value of msgpack."""


def head(count, small, wide):
    """The head of a value with a count: the short form where there is one, else that of the least width."""
    if small is not None and count < small[1]:
        return bytes([small[0] | count])
    code, width = next(form for form in wide if count < 256**form[1])
    return bytes([code]) + count.to_bytes(width, "big")


def pack(value):
    if isinstance(value, Packed):
        return value
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + value.to_bytes(8, "big", signed=True) if value < 1 << 63 \
            else b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return head(len(data), (0xA0, 32), [(0xD9, 1), (0xDA, 2), (0xDB, 4)]) + data
    if isinstance(value, bytes):
        return head(len(value), None, [(0xC4, 1), (0xC5, 2), (0xC6, 4)]) + value
    if isinstance(value, list):
        return head(len(value), (0x90, 16), [(0xDC, 2), (0xDD, 4)]) + b"".join(map(pack, value))
    if isinstance(value, dict):
        return pack_pairs(value.items())
    raise TypeError(value)


def pack_pairs(pairs):
    pairs = list(pairs)
    return Packed(head(len(pairs), (0x80, 16), [(0xDE, 2), (0xDF, 4)]) + b"".join(pack(k) + pack(v) for k, v in pairs))


def ext(code, payload):
    return Packed(head(len(payload), None, [(0xC7, 1), (0xC8, 2), (0xC9, 4)]) + bytes([code]) + payload)


def array(shape, data, dtype="float32"):
    """An array of NumPy: `data` are bytes, or floats."""
    data = data if isinstance(data, bytes) else struct.pack(f"<{len(data)}f", *data)
    return ext(1, pack([list(shape), dtype, data]))


def tree_of(model):
    """{name: value} by dotted names as nested maps."""
    tree = {}
    for tensor_name, value in model.items():
        node = tree
        *path, leaf = tensor_name.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


class ConvertCase(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.out = self.folder / "out"

    def run_script(self, *arguments, **options):
        return subprocess.run([sys.executable, "-I", str(SCRIPT), *map(str, arguments)], capture_output=True, text=True,
                              timeout=120, **options)

    def convert(self, checkpoint, *arguments):
        done = self.run_script(checkpoint, "-o", self.out, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "")
        return read_safetensors(self.out / "model.safetensors") if (self.out / "model.safetensors").exists() else None

    def config(self):
        """What was written beside the tensors."""
        return json.loads((self.out / "config.json").read_text())

    def assert_refused(self, checkpoint, *parts, arguments=()):
        """One line says what is wrong, and nothing is left behind."""
        before = sorted(os.listdir(self.folder))
        found, stderr = self.convert_here(checkpoint, *arguments)
        errors = errors_of(stderr)
        self.assertEqual((found, len(errors)), (3, 1), stderr)
        for part in parts:
            self.assertIn(part, errors[0])
        self.assertEqual(sorted(os.listdir(self.folder)), before, "something was left behind")

    def save(self, root, storages=None, **options):
        path = self.folder / "checkpoint.pt"
        archive_bytes(root, {} if storages is None else storages, path, **options)
        return path

    def save_model(self, model=None, wrap=lambda state: {"model_state_dict": state, "config": {"num_heads": 2}}):
        state, storages = state_and_storages(tiny_model() if model is None else model)
        return self.save(wrap(state), storages)

    def convert_here(self, checkpoint, *arguments):
        """The same in this process, for many small runs: (exit code, stderr). A success leaves no folder."""
        stderr = io.StringIO()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with contextlib.redirect_stderr(stderr), mock.patch("conversion.folder.sync"):
                code = convert.main([str(checkpoint), "-o", str(self.out), *map(str, arguments)])
        finally:
            signal.signal(signal.SIGTERM, handler)
        if code == 0:
            shutil.rmtree(self.out)
        return code, stderr.getvalue()

    def expect_fixture(self, converted, model, left_out=lambda name: False):
        """What was converted against the digests of what the public code wrote."""
        expected = json.loads((UPSTREAM / model / "tensors.json").read_text())
        self.assertEqual(set(converted), {name for name in expected if not left_out(name)})
        for tensor_name, (dtype, shape, data) in converted.items():
            self.assertEqual([dtype, shape, hashlib.sha256(data).hexdigest()], expected[tensor_name], tensor_name)


TOKENS = [bytes([n]) for n in (*PickleReader.HANDLERS, 0x00, 0x7F, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xDD, 0xDF, 0xFF)] + [
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n", b"(t", b"}(", b"](",
    b"q\x00", b"h\x00", b"X\x01\x00\x00\x00a", b"\x8a\x08" + b"\xff" * 8, b"\x8a\xff" + b"\x7f" * 255, b"\xff" * 4, b"\0" * 4,
    b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xc7\xff\x01", b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff", b"PK\x01\x02", b"PK\x05\x06"]


def mutated(data, rng, other):
    """A damaged copy: bytes changed, cut out, doubled or swapped in from `other`, or the end cut off."""
    places = range(len(data) + 1)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, size, kind, token = min(rng.choice(places), len(out)), rng.choice((1, 2, 4, 8, 16, 64, 256)), rng.randrange(8), rng.choice(TOKENS)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind in (2, 3):
            out[at:at + (0 if kind == 2 else len(token))] = token
        elif kind == 4:
            del out[at:at + size]
        elif kind in (5, 6):
            begin, source = rng.choice(places), data if rng.randrange(2) else other
            out[at:at + (0 if kind == 5 else size)] = source[begin:begin + size]
        elif kind == 7 and rng.randrange(4) == 0:
            del out[at:]
    return bytes(out)
