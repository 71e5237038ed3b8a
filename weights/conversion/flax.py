"""Checkpoints of Flax: one msgpack map, the parameters themselves or a TrainState that has them under `params`.

What must stay true: nothing but arrays is made of a file, and of these only places and shapes; their bytes are read when
they are written out. Whatever else the file holds is passed over by its lengths. No length is believed beyond the file, a
walk takes memory for MAX_DEPTH levels alone, and a tree of parameters has at most MAX_ENTRIES entries. The first pass
over a map notes where its values begin, so that keys may come in any order.
"""
import math
import os

from .common import MAX_RANK, Rejected, is_msgpack_map, refuse_other_files

MAX_DEPTH = 64  # of what is passed over
MAX_TREE_DEPTH = 8  # of the parameters
MAX_ENTRIES = 200_000
MAX_NAME_BYTES = 512
DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
CHUNKED = "__msgpack_chunked_array__"
EXT_ARRAY, EXT_SCALAR = 1, 3

INTEGER, MAP, ARRAY, STRING, BINARY, EXT, FLOAT, NIL, BOOLEAN = (
    "an integer", "a map", "an array", "a string", "bytes", "an ext value", "a float", "nil", "a boolean")
# First byte -> (kind, bytes of the number that follows). The number is a length, a count or the value itself.
FORMS = {0xC0: (NIL, 0), 0xC2: (BOOLEAN, 0), 0xC3: (BOOLEAN, 0), 0xC4: (BINARY, 1), 0xC5: (BINARY, 2), 0xC6: (BINARY, 4),
         0xC7: (EXT, 1), 0xC8: (EXT, 2), 0xC9: (EXT, 4), 0xCA: (FLOAT, 4), 0xCB: (FLOAT, 8), 0xCC: (INTEGER, 1),
         0xCD: (INTEGER, 2), 0xCE: (INTEGER, 4), 0xCF: (INTEGER, 8), 0xD0: (INTEGER, 1), 0xD1: (INTEGER, 2),
         0xD2: (INTEGER, 4), 0xD3: (INTEGER, 8), 0xD9: (STRING, 1), 0xDA: (STRING, 2), 0xDB: (STRING, 4),
         0xDC: (ARRAY, 2), 0xDD: (ARRAY, 4), 0xDE: (MAP, 2), 0xDF: (MAP, 4)}
SIZED = {STRING: 1, BINARY: 1, EXT: 1, ARRAY: 1, MAP: 2}  # least bytes that each counted thing takes


class Tensor:
    """Where an array's bytes are, in row-major order: (offset, bytes) of its pieces."""

    def __init__(self, dtype, shape, pieces):
        self.dtype, self.shape, self.pieces = dtype, shape, pieces
        self.elements = math.prod(shape)


class Reader:
    """Walks over the values of a file. `at` is the next byte, `end` the first that must not be read."""

    def __init__(self, file, size):
        self.file, self.at, self.end, self.entries_seen = file, 0, size, 0

    def take(self, count):
        if count > self.end - self.at:
            raise Rejected(f"byte {self.at}: found {self.end - self.at} bytes, expected {count}: cut short or damaged")
        self.file.seek(self.at)
        data = self.file.read(count)
        if len(data) != count:
            raise Rejected(f"byte {self.at}: found {len(data)} bytes, expected {count}: the file has changed")
        self.at += count
        return data

    def head(self):
        """(kind, number, ext type) of the next value; what the number counts is not read."""
        start = self.at
        byte = self.take(1)[0]
        code = None
        if byte < 0x80 or byte >= 0xE0:
            return INTEGER, byte if byte < 0x80 else byte - 256, None
        if byte < 0xC0:
            kind, number = (MAP, byte & 15) if byte < 0x90 else (ARRAY, byte & 15) if byte < 0xA0 else (STRING, byte & 31)
        elif 0xD4 <= byte <= 0xD8:
            kind, number = EXT, 1 << (byte - 0xD4)
        elif byte in FORMS:
            kind, width = FORMS[byte]
            signed = 0xD0 <= byte <= 0xD3
            number = int.from_bytes(self.take(width), "big", signed=signed) if width else byte == 0xC3
        else:
            raise Rejected(f"byte {start}: found {byte:#x}, expected a value of msgpack")
        if kind == EXT:
            code = int.from_bytes(self.take(1), "big", signed=True)
        if kind in SIZED and number * SIZED[kind] > self.end - self.at:
            raise Rejected(f"byte {start}: found {kind} of {number}, expected at most {(self.end - self.at) // SIZED[kind]} "
                           "in what is left: cut short or damaged")
        return kind, number, code

    def expect(self, kind, what):
        start = self.at
        found, number, _ = self.head()
        if found != kind:
            raise Rejected(f"{what}: found {found} at byte {start}, expected {kind}")
        return number

    def text(self, limit, what):
        start, length = self.at, self.expect(STRING, what)
        if length > limit:
            raise Rejected(f"{what}: found {length} bytes at byte {start}, expected at most {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise Rejected(f"{what}: found bytes that are not UTF-8 at byte {start}") from None

    def skip(self):
        """Passes over one value."""
        left = [1]  # values still to come, of each level
        while left:
            if left[-1] == 0:
                left.pop()
                continue
            left[-1] -= 1
            kind, number, _ = self.head()
            if kind in (STRING, BINARY, EXT):
                self.at += number
            elif kind in (ARRAY, MAP):
                if len(left) > MAX_DEPTH:
                    raise Rejected(f"byte {self.at}: found more than {MAX_DEPTH} levels, expected at most that many")
                left.append(number * SIZED[kind])

    def entries(self, name):
        """{key: where its value begins} of the map that comes next."""
        count, where = self.expect(MAP, name), {}
        self.entries_seen += count
        if self.entries_seen > MAX_ENTRIES:
            raise Rejected(f"{name}: found more than {MAX_ENTRIES} entries, expected at most that many")
        for _ in range(count):
            key = self.text(MAX_NAME_BYTES, f"{name}: key")
            if key in where:
                raise Rejected(f"{name}: found the key {key} twice, expected it once")
            where[key] = self.at
            self.skip()
        return where

    def sequence(self, at, name):
        """Where the values of a map with the keys "0", "1", ... begin, in the order of the keys."""
        self.at = at
        where = self.entries(name)
        if any(str(i) not in where for i in range(len(where))):
            raise Rejected(f"{name}: found the keys {sorted(where)[:8]}, expected 0, 1, 2, ...")
        return [where[str(i)] for i in range(len(where))]

    def collect(self, at, name, depth, tensors):
        """Adds the arrays of the value at `at` to `tensors`, by their path."""
        self.at = at
        kind, _, code = self.head()
        if kind == EXT and code in (EXT_ARRAY, EXT_SCALAR):
            add(tensors, name, self.array(at, name))
        elif kind != MAP:
            raise Rejected(f"{name}: found {kind}{'' if code is None else f' {code}'} at byte {at}, "
                           "expected a map or an array of numbers")
        elif depth > MAX_TREE_DEPTH:
            raise Rejected(f"{name}: found more than {MAX_TREE_DEPTH} levels of parameters, expected at most that many")
        else:
            self.at = at
            where = self.entries(name)
            if CHUNKED in where:
                add(tensors, name, self.chunked(where, name))
                return
            for key, position in where.items():
                self.collect(position, f"{name}.{key}" if depth else key, depth + 1, tensors)

    def array(self, at, name):
        """An ext value that holds [shape, type, bytes], and nothing after them."""
        self.at, outer = at, self.end
        kind, length, code = self.head()
        if kind != EXT or code not in (EXT_ARRAY, EXT_SCALAR):
            raise Rejected(f"{name}: found {kind} at byte {at}, expected an array of numbers")
        self.end = end = self.at + length
        try:
            parts = self.expect(ARRAY, name)
            if parts != 3:
                raise Rejected(f"{name}: found {parts} parts, expected shape, type and bytes")
            rank = self.expect(ARRAY, f"{name}: shape")
            if rank > MAX_RANK:
                raise Rejected(f"{name}: found {rank} dimensions, expected at most {MAX_RANK}")
            shape = tuple(self.extent(name) for _ in range(rank))
            dtype = self.text(32, f"{name}: type")
            if dtype not in DTYPES:
                raise Rejected(f"{name}: found the type {dtype}, expected float32, float16 or bfloat16")
            size = self.expect(BINARY, f"{name}: data")
            expected = math.prod(shape) * DTYPES[dtype][1]
            if size != expected:
                raise Rejected(f"{name}: found {size} bytes, expected {expected} for {dtype} of shape {list(shape)}")
            if self.at + size != end:
                raise Rejected(f"{name}: found {end - self.at - size} bytes after the data, expected none")
            return Tensor(DTYPES[dtype], shape, [(self.at, size)])
        finally:
            self.end = outer

    def extent(self, name):
        extent = self.expect(INTEGER, f"{name}: shape")
        if not 0 <= extent < 1 << 63:
            raise Rejected(f"{name}: found the extent {extent}, expected 0 to {(1 << 63) - 1}")
        return extent

    def chunked(self, where, name):
        """An array of more than 2^30 bytes, which Flax cuts into flat ones."""
        if set(where) != {CHUNKED, "shape", "chunks"}:
            raise Rejected(f"{name}: found the keys {sorted(where)[:8]}, expected those of an array in chunks")
        self.at = where[CHUNKED]
        if self.head()[:2] != (BOOLEAN, True):
            raise Rejected(f"{name}: found {CHUNKED} other than true, expected true")
        shape = []
        for position in self.sequence(where["shape"], f"{name}: shape"):
            self.at = position
            shape.append(self.extent(name))
        if len(shape) > MAX_RANK:
            raise Rejected(f"{name}: found {len(shape)} dimensions, expected at most {MAX_RANK}")
        chunks = [self.array(position, name) for position in self.sequence(where["chunks"], f"{name}: chunks")]
        dtypes = {chunk.dtype for chunk in chunks}
        if len(dtypes) != 1:
            raise Rejected(f"{name}: found chunks of {len(dtypes)} types, expected 1")
        tensor = Tensor(dtypes.pop(), tuple(shape), [piece for chunk in chunks for piece in chunk.pieces])
        elements = sum(chunk.elements for chunk in chunks)
        if elements != tensor.elements:
            raise Rejected(f"{name}: found {elements} elements in its chunks, expected {tensor.elements}")
        return tensor


def add(tensors, name, tensor):
    if name in tensors:
        raise Rejected(f"{name}: found a second tensor of this name, expected one")
    tensors[name] = tensor


class Checkpoint:
    """An open file of Flax: its parameters by name, and their bytes on demand."""

    def __init__(self, file):
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        check_start(file.read(64))
        self.tensors = {}
        reader = Reader(self.file, self.size)
        where = reader.entries("the file")
        if reader.at != self.size:
            raise Rejected(f"byte {reader.at}: found {self.size - reader.at} bytes after the map, expected none")
        at = 0
        if "opt_state" in where and "params" not in where:
            raise Rejected(f"found a training state with the keys {sorted(where)[:8]}, expected params among them")
        for _ in range(2):  # params may hold another params: the variables of a module, kept whole
            if "params" in where:
                at = reader.at = where["params"]
                where = reader.entries("params")
        reader.collect(at, "params", 0, self.tensors)

    @staticmethod
    def storage_of(tensor):
        return tensor

    def tensor(self, tensor):
        """A tensor's elements in row-major order."""
        try:
            return b"".join(self.piece(*piece) for piece in tensor.pieces)
        except OSError as error:
            raise Rejected(f"cannot be read: {error.strerror}") from None

    def piece(self, offset, size):
        reader = Reader(self.file, self.size)
        reader.at = offset
        return reader.take(size)


def check_start(start):
    if is_msgpack_map(start):
        return
    if not start:
        raise Rejected("found an empty file, expected a checkpoint of Flax")
    if start[0] == 0x80 and start[1:2] and start[1] in range(1, 6):
        raise Rejected(f"found a pickle (bytes {start[:2].hex(' ')}), expected a msgpack map: nothing of it was loaded")
    if start.startswith(b"PK"):
        raise Rejected("found a zip archive (PK), expected a msgpack map: give a checkpoint of PyTorch a name that ends in .pt")
    refuse_other_files(start)
    raise Rejected(f"found the first byte {start[0]:#04x}, expected a msgpack map with entries (0x81 to 0x8f, 0xde or 0xdf)")
