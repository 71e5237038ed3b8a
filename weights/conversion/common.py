"""What all parts of the converter share: its two errors, limits, and how texts of files reach the terminal."""

import os
import stat

MAX_RANK = 8


class Rejected(Exception):
    """The input is not a checkpoint that can be converted."""


class CannotWrite(Exception):
    """The output cannot be written."""


def read_file(path, most):
    """The bytes of a regular file. A device or a pipe may have no end, and is not opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Rejected(f"{one_line(path)}: not a regular file")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Rejected(f"{one_line(path)}: file is too large (expected at most {most} bytes)")
    return data


def one_line(error):
    """A message, or text from a file, as one line without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:1000])


def is_msgpack_map(start):
    """Whether a file begins like a map of msgpack: none that is empty, which would begin like a pickle."""
    return bool(start) and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF))


def refuse_other_files(start):
    """Names what a file is that begins like something else than a checkpoint."""
    if start.startswith(b"version https://git-lfs"):
        raise Rejected("looks like a Git LFS pointer: fetch the file itself with `git lfs pull`")
    if start.startswith(b"MMRC"):
        raise Rejected("a file of the C++ line of MM-Rec (found MMRC at its start), which holds the embedding alone: "
                       "the blocks were never saved, so there is no model in it")
    if start.lstrip()[:1] == b"<":
        raise Rejected("looks like a web page: download the file itself")
    if start[8:9] == b"{":
        raise Rejected("looks like a safetensors file, which needs no conversion")
