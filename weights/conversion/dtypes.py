"""The types of weights and conversions between them: widening is exact, narrowing rounds to nearest even."""
import array
import math
import struct
import sys

from .common import Rejected

WEIGHT_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per element


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
