"""A pickle of tensors, interpreted: symbols, storages and tensors instead of objects.

What must stay true: nothing of the pickle is ever executed. A small stack machine knows the few opcodes and names that
state dicts are made of; it imports nothing, calls nothing and refuses the rest by name.
"""
import math
import re
import struct

from .common import MAX_RANK, Rejected

# Storage class -> (safetensors dtype, bytes per element). Only the first three can be weights.
STORAGES = {
    "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8), "LongStorage": ("I64", 8), "IntStorage": ("I32", 4), "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1),
}
MAX_KEY = 1 << 53
# Names that only the pickles of quantised models need.
QUANTISED = re.compile(r"torch(\._utils\._rebuild_qtensor|\.(Q[A-Z]\w*Storage|qu?int\d+\w*|per_(tensor|channel)_\w+)"
                       r"|\.(ao\.)?(nn\.)?quanti\w+\..*)")


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
    """Python finds integers in a dictionary by their remainder, so larger ones can be made to meet, each with all others."""
    if isinstance(key, int) and abs(key) > MAX_KEY:
        raise Rejected(f"a dictionary has a key that is no number of a parameter (expected at most {MAX_KEY})")
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
        if QUANTISED.fullmatch(f"{module}.{name}"):
            raise Rejected(f"holds quantised weights (found {module}.{name}): convert the checkpoint that they were made of")
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
