"""Checkpoints of PyTorch (torch.save since 1.6): a zip archive with a pickle and the bytes of each storage."""
import os
import struct
import zipfile

from .common import Rejected, is_msgpack_map, one_line, refuse_other_files
from .pickle_reader import PickleReader, Tensor

MAX_PICKLE_BYTES = 64 << 20

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
STATE_DICT_KEYS = ("model_state_dict", "state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")

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

    @staticmethod
    def storage_of(tensor):
        return tensor.storage.key, tensor.storage.dtype

    def storage(self, tensor):
        """The bytes of its storage; the last one is kept, because tensors may share it."""
        storage, key = tensor.storage, self.storage_of(tensor)
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
        data = self.storage(tensor)
        if is_contiguous(tensor):
            return data[tensor.offset * size:(tensor.offset + tensor.elements) * size]
        elements = memoryview(data)[:len(data) // size * size].cast({2: "H", 4: "I"}[size])
        out = bytearray()
        gather(elements, tensor.offset, tensor.shape, tensor.stride, out)
        return bytes(out)


def is_contiguous(tensor):
    expected = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride)):
        if extent != 1 and stride != expected:
            return tensor.elements == 0
        expected *= extent
    return True


def gather(elements, offset, shape, stride, out):
    if not shape:
        out += elements[offset:offset + 1].tobytes()
    elif len(shape) == 1:
        step = stride[0]
        if step == 0:
            out += elements[offset:offset + 1].tobytes() * shape[0]
        else:
            out += elements[offset:offset + (shape[0] - 1) * step + 1:step].tobytes()
    else:
        for i in range(shape[0]):
            gather(elements, offset + i * stride[0], shape[1:], stride[1:], out)


def check_start(start):
    if start.startswith(b"PK\x03\x04"):
        return
    if start.startswith(LEGACY_MAGIC) or b"ustar" in start:
        raise Rejected("written in PyTorch's format from before 1.6, which only PyTorch can read safely. "
                       "Re-save it with a current one: torch.save(torch.load(FILE, weights_only=True), NEW_FILE)")
    refuse_other_files(start)
    hint = "; give a checkpoint of Flax a name that ends in .msgpack" if is_msgpack_map(start) else ""
    raise Rejected(f"not a PyTorch checkpoint (found no zip archive{hint})")


# ----------------------------------------------------------------------------------------------------------------------
# The state dict

def read_checkpoint(path):
    """(the archive, what its pickle holds)"""
    archive = Archive(path)
    return archive, PickleReader(archive.read("data.pkl", MAX_PICKLE_BYTES)).read()


def find_state_dict(root):
    if not isinstance(root, dict):
        raise Rejected("not a state dict (expected a dictionary of tensors)")
    for key in STATE_DICT_KEYS:
        if isinstance(root.get(key), dict):
            return root[key]
    return root


def refuse_quantised(root, state):
    """Weights that were quantised, or trained for it with observers between the layers: no model here computes that."""
    marks = [key for key in root if key == "quantized" and root[key] is not False and root[key] is not None]
    marks += [key for key in state if isinstance(key, str)
              and ("activation_post_process" in key or "fake_quant" in key or "_packed_params" in key
                   or key.endswith(".zero_point"))]
    if marks:
        raise Rejected(f"a quantised checkpoint, or one with observers of quantisation (found {marks[0]}): convert one "
                       "that was trained without")


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
