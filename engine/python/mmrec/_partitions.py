"""Cuts inputs into partitions, and keeps folders of results in which each partition is complete or absent.

Must stay true: every document is in exactly one partition. A partition's file is renamed into place when it is whole,
after the file of its sums. Its name follows from the input, its size and the place in it. A folder of results belongs
to one model, one set of inputs and one set of options, which its run.json lists.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import lzma
import math
import os
import pathlib
import zlib
from typing import Any, BinaryIO, Iterator, Optional, Union, cast

SPLITS = ("file", "line", "blank", "jsonl", "parquet")
_BLANKS = b" \t\r\v\f"
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "lzma", b"BZh": "bz2"}
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
_ENDLESS = 1 << 62  # the size of a compressed text, which is not known


class InputError(Exception):
    """An input that is missing or malformed, in one line."""


class RefusedError(Exception):
    """A folder of results of other inputs, options or another model, in one line."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document of an input, or the error of its row."""

    name: str  #: FILE, FILE@BYTE or, of Parquet, FILE@ROW; bytes count after decompression
    place: int  #: the byte or row
    text: str  #: empty if there is an error
    id: Union[str, int, float, None] = None  #: the row's own `id`
    error: Optional[str] = None  #: the error of the row, in one line that names the row

    @property
    def head(self) -> dict[str, Any]:
        """What begins the document's record."""
        return {"name": self.name} if self.id is None else {"name": self.name, "id": self.id}


@dataclasses.dataclass(frozen=True)
class Partition:
    """Bytes [begin, end) of `path` (lines or paragraphs that begin there), or row groups [begin, end) of Parquet. A
    compressed file is one partition, because reading cannot begin in its middle."""

    path: str
    size: int
    split: str
    begin: int
    end: int

    @property
    def name(self) -> str:
        key = f"{self.path}\n{self.size}\n{self.split}\n{self.begin}\n{self.end}"
        return f"part-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}"


def plan(inputs: list[str], split: Optional[str], partition_bytes: int) -> list[Partition]:
    """Partitions of about `partition_bytes`. A folder stands for the files in it. Raises InputError, OSError."""
    result: list[Partition] = []
    for path in _files(inputs):
        size = os.stat(path).st_size
        names = [suffix for suffix in pathlib.Path(path).suffixes if suffix not in _COMPRESSED_SUFFIXES]
        how = split or {".jsonl": "jsonl", ".parquet": "parquet"}.get(names[-1] if names else "", "file")
        if how == "parquet":
            result.extend(_row_groups(path, size, partition_bytes))
        elif how == "file":
            result.append(Partition(path, size, how, 0, size))
        elif _compression(path):
            result.append(Partition(path, size, how, 0, _ENDLESS))
        else:
            for begin in range(0, size, partition_bytes):
                result.append(Partition(path, size, how, begin, min(begin + partition_bytes, size)))
    if len({partition.name for partition in result}) != len(result):
        raise InputError("found an input twice, expected each once")
    return result


def _files(inputs: list[str]) -> Iterator[str]:
    for given in inputs:
        path = os.path.abspath(given)
        if os.path.isdir(path):
            yield from sorted(str(file) for file in pathlib.Path(path).rglob("*") if file.is_file())
        else:
            yield path


def _parquet(path: str) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise InputError(f"{path}: Parquet needs pyarrow. Try: pip install pyarrow") from fault
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as fault:
        raise InputError(f"{path}: {str(fault).splitlines()[0]}") from fault


def _row_groups(path: str, size: int, partition_bytes: int) -> Iterator[Partition]:
    metadata = _parquet(path).metadata
    begin, taken = 0, 0
    for group in range(metadata.num_row_groups):
        taken += metadata.row_group(group).total_byte_size
        if taken >= partition_bytes or group + 1 == metadata.num_row_groups:
            yield Partition(path, size, "parquet", begin, group + 1)
            begin, taken = group + 1, 0


def _compression(path: str) -> Optional[str]:
    """The module that reads the file, by its first bytes; None if it is not compressed."""
    with open(path, "rb") as file:
        begin = file.read(6)
    return next((module for magic, module in _MAGIC.items() if begin.startswith(magic)), None)


def _open(path: str) -> BinaryIO:
    module = _compression(path)
    if module is None:
        return open(path, "rb")
    if module != "zstd":
        return cast(BinaryIO, importlib.import_module(module).open(path, "rb"))
    try:
        import pyarrow
    except ImportError as fault:
        raise InputError(f"{path}: is compressed with zstd, which needs pyarrow. Try: pip install pyarrow") from fault
    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


def documents(partition: Partition, field: str) -> Iterator[Document]:
    """Each document of the partition, also empty ones. A blank line is no document. Raises InputError, OSError."""
    path = partition.path
    try:
        if partition.split == "parquet":
            yield from _parquet_documents(partition, field)
            return
        with _open(path) as file:
            if partition.split == "file":
                yield Document(path, 0, file.read().decode("utf-8", "replace"))
                return
            for at, text in (_paragraphs if partition.split == "blank" else _lines)(file, partition):
                if partition.split == "jsonl":
                    yield _from_json(text, field, path, at)
                else:
                    yield Document(f"{path}@{at}", at, text.decode("utf-8", "replace"))
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as fault:  # pyarrow raises ValueError, too
        if isinstance(fault, OSError) and fault.filename is not None:
            raise
        raise InputError(f"{path}: cannot be read ({str(fault).splitlines()[0]})") from fault


def _seek_line(file: BinaryIO, at: int) -> int:
    """Where the first line is that begins at `at` or later; reading goes on there."""
    if at > 0:
        file.seek(at - 1)
        at += len(file.readline()) - 1  # one that began before; of one that ends just there, its end alone
    return at


def _lines(file: BinaryIO, partition: Partition) -> Iterator[tuple[int, bytes]]:
    """Lines that begin in the partition and are not blank, without their ends."""
    at = _seek_line(file, partition.begin)
    while at < partition.end:
        line = file.readline()
        if not line:
            return
        if line.strip():
            yield at, line.removesuffix(b"\n").removesuffix(b"\r")
        at += len(line)


def _paragraphs(file: BinaryIO, partition: Partition) -> Iterator[tuple[int, bytes]]:
    """Paragraphs, which end at a blank line, whose first line begins in the partition."""
    begin = at = _seek_line(file, partition.begin)
    lines: list[bytes] = []
    is_of_another = not _is_after_blank(file, at)
    while lines or at < partition.end:
        line = file.readline()
        if line.strip(b"\n" + _BLANKS):
            if not lines:
                begin = at
            if not is_of_another:
                lines.append(line.removesuffix(b"\n").removesuffix(b"\r"))
        else:
            if lines:
                yield begin, b"\n".join(lines)
                lines = []
            if not line:
                return
            is_of_another = False
        at += len(line)


def _is_after_blank(file: BinaryIO, line: int) -> bool:
    """Whether the line before place `line` is blank, or `line` is 0. Reading goes on at `line`."""
    at = line - 1  # where the end of the line before is
    while at > 0:
        begin = max(0, at - 65536)
        file.seek(begin)
        rest = file.read(at - begin).rstrip(_BLANKS)
        if rest:
            file.seek(line)
            return rest.endswith(b"\n")
        at = begin
    if line > 0:
        file.seek(line)
    return True


class _Rounded(float):
    """A number that a record cannot have as it is written."""


def _real(text: str) -> float:
    return float(text) if repr(float(text)) == text else _Rounded(text)


def _whole(text: str) -> Union[int, float]:
    return int(text) if text != "-0" else _Rounded(text)


def _bad(path: str, place: int, what: str, key: Any = None) -> Document:
    return Document(f"{path}@{place}", place, "", key, f"{path}@{place}: {what}")


def _from_json(line: bytes, field: str, path: str, place: int) -> Document:
    try:
        row = json.loads(line, parse_float=_real, parse_int=_whole)
    except (ValueError, RecursionError) as fault:
        return _bad(path, place, f"no JSON ({fault})")
    if not isinstance(row, dict) or field not in row:
        found = ", ".join(f"'{key}'" for key in row)[:100] if isinstance(row, dict) else type(row).__name__
        return _bad(path, place, f"found {found or 'no field'}, expected a field '{field}'")
    return _from_row(row.get("id"), row[field], field, path, place)


def _from_row(key: Any, text: Any, field: str, path: str, place: int) -> Document:
    if isinstance(key, _Rounded):
        return _bad(path, place, f"field 'id' (found {key!r}, expected a number as Python writes it)")
    is_one = isinstance(key, (str, int, float, type(None))) and not isinstance(key, bool)
    if not is_one or (isinstance(key, float) and not math.isfinite(key)):
        return _bad(path, place, f"field 'id' (found {key!r:.40}, expected a string or a number)")
    if isinstance(text, str) and _is_unicode(text):
        return Document(f"{path}@{place}", place, text, key)
    found = "half of a surrogate pair" if isinstance(text, str) else type(text).__name__
    return _bad(path, place, f"field '{field}' (found {found}, expected a string)", key)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet_documents(partition: Partition, field: str) -> Iterator[Document]:
    file = _parquet(partition.path)
    names = file.schema_arrow.names
    if field not in names:
        raise InputError(f"{partition.path}: no column '{field}' (found {', '.join(names)[:100]})")
    row = sum(file.metadata.row_group(group).num_rows for group in range(partition.begin))
    groups = list(range(partition.begin, partition.end))
    columns = [field, "id"] if "id" in names else [field]
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=columns):
        for values in batch.to_pylist():
            yield _from_row(values.get("id"), values[field], field, partition.path, row)
            row += 1


class Results:
    """A folder of results: PARTITION.jsonl, PARTITION.sums.json, run.json and the empty files of agree()."""

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)

    def begin(self, run: dict[str, Any]) -> None:
        """Creates the folder, or checks that it is of the same run. Raises RefusedError, OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "run.json"
        try:
            before = _read(file)
        except FileNotFoundError:
            if any(self.folder.glob("part-*.jsonl")):
                raise RefusedError(
                    f"{self.folder}: found results without a run.json, expected an empty folder"
                ) from None
            _write(file, json.dumps(run, indent=1) + "\n")
            return
        for key in sorted({*before, *run}):
            if before.get(key) != run.get(key):
                found, wanted = json.dumps(run.get(key))[:80], json.dumps(before.get(key))[:80]
                raise RefusedError(
                    f"{file}: another {ascii(key)[1:-1]:.40} (found {found}, expected {wanted}). Try: another -o DIR"
                )

    def agree(self, name: str, value: str) -> None:
        """Checks by an empty file that `name` is the same for all partitions. Raises RefusedError, OSError."""
        own = self.folder / f"{name}-{value}"
        new = not own.exists()
        for _ in range(2):  # another worker may have begun with another value meanwhile
            if others := sorted(file.name for file in self.folder.glob(f"{name}-*") if file != own):
                if new:
                    own.unlink(missing_ok=True)
                found = others[0].removeprefix(f"{name}-")
                raise RefusedError(
                    f"{self.folder}: another {name} (found {value}, expected {found}). Try: --{name} {found}"
                )
            own.touch()

    def has(self, partition: Partition) -> bool:
        return (self.folder / f"{partition.name}.jsonl").exists()

    def sums(self, partition: Partition) -> dict[str, Any]:
        """Raises RefusedError, OSError."""
        file = self.folder / f"{partition.name}.sums.json"
        sums = _read(file)
        for key, value in sums.items():
            if not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
                raise RefusedError(f"{file}: {ascii(key)[1:-1]:.40} (found {json.dumps(value):.40}, expected a number)")
        return sums

    def write(self, partition: Partition, records: Iterator[dict[str, Any]], sums: dict[str, Any]) -> None:
        """Writes `records`, which add up `sums` meanwhile. The file of sums appears before the partition's."""
        target = self.folder / f"{partition.name}.jsonl"
        temporary = _temporary(target)
        try:
            # A name that is no UTF-8 is written as JSON escapes.
            with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _write(self.folder / f"{partition.name}.sums.json", json.dumps(sums) + "\n")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as fault:
        raise RefusedError(f"{file}: no JSON ({fault})") from fault
    if not isinstance(found, dict):
        raise RefusedError(f"{file}: found {type(found).__name__}, expected an object")
    return found


def _temporary(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")


def _write(target: pathlib.Path, text: str) -> None:
    temporary = _temporary(target)
    temporary.write_text(text)
    os.replace(temporary, target)
