"""Inputs cut into partitions, and folders of results of which each partition is complete or absent.

What must stay true: every document is in exactly one partition; a partition's file is renamed into place when it is whole,
after the sums of it; its name follows from the input, its size and the place in it; a folder of results belongs to one
model, one set of inputs and one set of options, which run.json there says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any, BinaryIO, Iterator, Optional

SPLITS = ("file", "line", "blank", "jsonl", "parquet")
_BLANKS = b" \t\r\v\f"


class InputError(Exception):
    """An input that is missing or malformed, in one line."""


class RefusedError(Exception):
    """A folder of results of other inputs, options or another model, in one line."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """Bytes [begin, end) of `path` (lines or paragraphs that begin there), or of Parquet the row groups [begin, end)."""

    path: str
    size: int
    split: str
    begin: int
    end: int

    @property
    def name(self) -> str:
        key = f"{self.path}\n{self.size}\n{self.split}\n{self.begin}\n{self.end}"
        return f"part-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def plan(inputs: list[str], split: Optional[str], partition_bytes: int) -> list[Partition]:
    """Partitions of about so many bytes. Folders stand for the files in them. Raises InputError, OSError."""
    result: list[Partition] = []
    for path in _files(inputs):
        size = os.stat(path).st_size
        how = split or {".jsonl": "jsonl", ".parquet": "parquet"}.get(pathlib.Path(path).suffix, "file")
        if how == "parquet":
            result.extend(_row_groups(path, size, partition_bytes))
        elif how == "file":
            result.append(Partition(path, size, how, 0, size))
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


def documents(partition: Partition, field: str) -> Iterator[tuple[str, int, str]]:
    """(name, place, text) of each document: the name is FILE, FILE@BYTE or, of Parquet, FILE@ROW. Raises InputError."""
    path = partition.path
    if partition.split == "parquet":
        yield from _parquet_documents(partition, field)
    elif partition.split == "file":
        with open(path, "rb") as file:
            yield path, 0, file.read().decode("utf-8", "replace")
    elif partition.split == "blank":
        for at, text in _paragraphs(partition):
            yield f"{path}@{at}", at, text.decode("utf-8", "replace")
    else:
        for at, line in _lines(partition):
            name = f"{path}@{at}"
            yield name, at, _field(line, field, name) if partition.split == "jsonl" else line.decode("utf-8", "replace")


def _seek_line(file: BinaryIO, at: int) -> int:
    """Where the first line is that begins at `at` or later; reading goes on there."""
    if at > 0:
        file.seek(at - 1)
        at += len(file.readline()) - 1  # one that began before; of one that ends just there, its end alone
    return at


def _lines(partition: Partition) -> Iterator[tuple[int, bytes]]:
    """Lines that begin in the partition and are not blank, without their ends."""
    with open(partition.path, "rb") as file:
        at = _seek_line(file, partition.begin)
        while at < partition.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield at, line.removesuffix(b"\n").removesuffix(b"\r")
            at += len(line)


def _paragraphs(partition: Partition) -> Iterator[tuple[int, bytes]]:
    """Lines up to a blank one, of which the first begins in the partition."""
    with open(partition.path, "rb") as file:
        begin = at = _seek_line(file, partition.begin)
        lines: list[bytes] = []
        is_of_another = not _is_after_blank(file, at)
        file.seek(at)
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


def _is_after_blank(file: BinaryIO, at: int) -> bool:
    """Whether the line before the one that begins at `at` is blank; there is none at 0."""
    at -= 1  # where that line's end is
    while at > 0:
        begin = max(0, at - 65536)
        file.seek(begin)
        rest = file.read(at - begin).rstrip(_BLANKS)
        if rest:
            return rest.endswith(b"\n")
        at = begin
    return True


def _field(line: bytes, field: str, name: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as fault:
        raise InputError(f"{name}: no JSON ({fault})") from fault
    if not isinstance(record, dict) or field not in record:
        found = ", ".join(f"'{key}'" for key in record)[:100] if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{name}: no field '{field}' (found {found or 'no field'}, expected '{field}')")
    if not isinstance(record[field], str):
        raise InputError(f"{name}: field '{field}' (found {type(record[field]).__name__}, expected a string)")
    return str(record[field])


def _parquet_documents(partition: Partition, field: str) -> Iterator[tuple[str, int, str]]:
    file = _parquet(partition.path)
    if field not in file.schema_arrow.names:
        raise InputError(f"{partition.path}: no column '{field}' (found {', '.join(file.schema_arrow.names)[:100]})")
    row = sum(file.metadata.row_group(group).num_rows for group in range(partition.begin))
    groups = list(range(partition.begin, partition.end))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise InputError(f"{partition.path}@{row}: field '{field}' (found {type(text).__name__}, expected a string)")
            if text.strip():
                yield f"{partition.path}@{row}", row, text
            row += 1


class Results:
    """A folder of results: PARTITION.jsonl, PARTITION.sums.json and run.json."""

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)

    def begin(self, run: dict[str, Any]) -> None:
        """Creates the folder, or checks that it is of the same run. Raises RefusedError, OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "run.json"
        try:
            before = json.loads(file.read_text())
        except FileNotFoundError:
            if any(self.folder.glob("part-*.jsonl")):
                raise RefusedError(f"{self.folder}: found results without a run.json, expected an empty folder") from None
            _write(file, json.dumps(run, indent=1) + "\n")
            return
        except ValueError as fault:
            raise RefusedError(f"{file}: no JSON ({fault})") from fault
        for key in sorted({*before, *run}):
            if before.get(key) != run.get(key):
                found, wanted = json.dumps(run.get(key))[:80], json.dumps(before.get(key))[:80]
                raise RefusedError(f"{file}: another {key} (found {found}, expected {wanted}). Try: another -o DIR")

    def has(self, partition: Partition) -> bool:
        return (self.folder / f"{partition.name}.jsonl").exists()

    def sums(self, partition: Partition) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{partition.name}.sums.json").read_text()))

    def write(self, partition: Partition, records: Iterator[dict[str, Any]], sums: dict[str, Any]) -> None:
        """Writes `records`, while which `sums` is added up. Sums first, so that they are there when the partition is."""
        target = self.folder / f"{partition.name}.jsonl"
        temporary = _temporary(target)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _write(self.folder / f"{partition.name}.sums.json", json.dumps(sums) + "\n")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _temporary(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")


def _write(target: pathlib.Path, text: str) -> None:
    temporary = _temporary(target)
    temporary.write_text(text)
    os.replace(temporary, target)
