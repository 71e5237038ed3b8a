"""mmrec.score and mmrec.generate_many in one process: every document once, figures of the library, resuming,
refusals."""

import importlib
import json
import os
import random
import socket
import time

import pytest

from conftest import records, summary_of
from mmrec import _cluster, _partitions, generate_many, score

TEXTS = [f"Once upon a time there were {i} dogs.{' They ran.' * (i % 5)}" for i in range(30)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "prompt": text}) + "\n\n" for text in TEXTS))
    return path


def run(module, *arguments):
    return module.main([*map(str, arguments), "--no-ray", "--device", "cpu"])


def read(path, split, size=100):
    """Documents of all partitions of a file."""
    parts = _partitions.plan([str(path)], split, size)
    return [document for part in parts for document in _partitions.documents(part, "text")]


@pytest.mark.parametrize("size", [1, 7, 64, 65, 66, 1000, 10**6])
def test_every_line_is_in_one_partition(tmp_path, size):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"first\r\n\n" + b"".join(b"line %d\n" % i for i in range(100)) + b"without end")
    found = read(path, "line", size)
    assert [one.text for one in found] == ["first", *(f"line {i}" for i in range(100)), "without end"]
    assert len({one.name for one in found}) == len(found)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 50, 10**6])
def test_every_paragraph_is_in_one_partition(tmp_path, size):
    path = tmp_path / "paragraphs.txt"
    random.seed(1)
    lines = [random.choice([b"", b" \t", b"\r", b"one", b" two\r", b"3", b"four five"]) for _ in range(200)]
    path.write_bytes(b"\n".join(lines))
    found = read(path, "blank", size)
    expected, current = [], []
    for line in [*lines, b""]:
        if line.strip():
            current.append(line.rstrip(b"\r").decode())
        elif current:
            expected.append("\n".join(current))
            current = []
    assert [one.text for one in found] == expected
    for one in found:
        assert one.name == f"{path}@{one.place}"
        assert path.read_bytes()[one.place :].startswith(one.text.split("\n")[0].encode())


def test_a_blank_line_may_be_long(tmp_path):
    path = tmp_path / "paragraphs.txt"
    for before, count in ((b"one\n", 2), (b"one", 1), (b"", 1)):
        path.write_bytes(before + b" " * 200_000 + b"\nlast")
        assert len(_partitions.plan([str(path)], "blank", len(before) + 150_000)) == 2
        assert len(read(path, "blank", len(before) + 150_000)) == count


def test_figures_are_those_of_the_scorer(corpus, model, tokenizer, tmp_path, capsys):
    assert run(score, corpus, "-o", tmp_path / "out", "--partition-mib", "0.0005", "--logprobs") == 0
    told = capsys.readouterr()
    assert told.err.count(" partitions, ") == len(list((tmp_path / "out").glob("part-*.jsonl"))) > 1
    found = json.loads(told.out)
    scores, summary = summary_of(model, tokenizer, TEXTS)
    for name in ("docs", "tokens", "bytes", "words"):
        assert found[name] == getattr(summary, name)
    for name in ("nll", "ppl", "ppl_stderr", "bits_per_byte", "word_ppl", "byte_ppl"):
        assert found[name] == pytest.approx(getattr(summary, name), rel=1e-6), name
    written = sorted(records(tmp_path / "out"), key=lambda record: int(record["name"].rsplit("@")[-1]))
    for one, record in zip(scores, written):
        assert record["logprobs"] == pytest.approx(one.logprobs.tolist(), abs=1e-5)


def test_it_goes_on_and_refuses_another_run(corpus, tmp_path, capsys):
    arguments = [corpus, "-o", tmp_path / "out", "--partition-mib", "0.0005"]
    assert run(score, *arguments) == 0
    before = capsys.readouterr().out
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    times = {part: part.stat().st_mtime_ns for part in parts}
    parts[0].unlink()
    assert run(score, *arguments) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == json.loads(before)
    assert f"{len(parts) - 1} of {len(parts)} partitions are there" in again.err
    assert all(part.stat().st_mtime_ns == times[part] for part in parts[1:])
    assert run(score, *arguments, "--logprobs") == 2
    assert "another logprobs" in capsys.readouterr().err
    os.utime(corpus, ns=(1, 1))
    assert run(score, *arguments) == 2
    assert "another inputs" in capsys.readouterr().err


def test_partitions_of_two_precisions_do_not_mix(corpus, tmp_path):
    assert run(score, corpus, "-o", tmp_path / "out") == 0
    results = _partitions.Results(tmp_path / "out")
    results.agree("precision", "fp32")
    for _ in range(2):
        with pytest.raises(_partitions.RefusedError, match="another precision .found bf16, expected fp32"):
            results.agree("precision", "bf16")
    results.agree("precision", "fp32")


def test_faults_are_a_line_and_an_exit_code(corpus, tmp_path, capsys):
    assert run(score, corpus, "-o", tmp_path / "a", "--field", "body") == 3
    error = capsys.readouterr().err
    assert "found 'text', 'prompt', expected a field 'body'" in error and error.count("\n") == 1
    assert run(score, tmp_path / "absent.jsonl", "-o", tmp_path / "b") == 3
    assert run(score, corpus, "-o", tmp_path / "c", "-m", tmp_path) == 3
    with pytest.raises(SystemExit, match="2"):
        run(score, corpus, "-o", tmp_path / "d", "--partition-mib", "inf")
    assert not list(tmp_path.glob("?/part-*")) and not list(tmp_path.glob("?/.*"))


def test_figures_do_not_depend_on_the_format(tmp_path, capsys):
    """Empty and blank texts are documents in each of them, and each row's id is kept."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"id": 2**63 - 1 - i, "text": text} for i, text in enumerate(["", " \n", *TEXTS[:5], "\t"])]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "corpus.parquet", row_group_size=3)
    reports = []
    for name, size in (("corpus.jsonl", "1"), ("corpus.parquet", "1"), ("corpus.parquet", "0.0001")):
        out = tmp_path / f"{name}.{size}"
        assert run(score, tmp_path / name, "-o", out, "--partition-mib", size) == 0
        reports.append(json.loads(capsys.readouterr().out))
        assert len(list(out.glob("part-*.jsonl"))) == (1 if size == "1" else 3)
        assert sorted(record["id"] for record in records(out)) == sorted(row["id"] for row in rows)
    assert reports[0] == reports[1] == pytest.approx(reports[2], rel=1e-6) and reports[0]["docs"] == len(rows)
    assert {int(record["name"].rsplit("@")[-1]) for record in records(out)} == set(range(len(rows)))


def test_a_damaged_parquet_file_is_named(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "corpus.parquet"
    for compression in ("none", "gzip"):  # text that is no UTF-8; pages that cannot be unpacked
        parquet.write_table(pyarrow.table({"text": TEXTS}), path, compression=compression, use_dictionary=False)
        data = bytearray(path.read_bytes())
        data[200] ^= 128
        path.write_bytes(data)
        assert run(score, path, "-o", tmp_path / compression) == 3
        assert f"mmrec.score: {path}: cannot be read (" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tokens": "1"}', '{"tokens": NaN}', '{"\\u001b[2J": "x"}'])
def test_results_that_no_run_writes_are_refused_in_a_line(tmp_path, text):
    results = _partitions.Results(str(tmp_path))
    part = _partitions.Partition("corpus", 1, "line", 0, 1)
    for file, read in [("run.json", lambda: results.begin({})), (f"{part.name}.sums.json", lambda: results.sums(part))]:
        (tmp_path / file).write_text(text)
        with pytest.raises(_partitions.RefusedError) as fault:
            read()
        assert file in str(fault.value) and str(fault.value).isprintable()


def test_an_id_comes_back_as_it_is_written_or_is_refused(tmp_path):
    def row(key):
        (tmp_path / "corpus.jsonl").write_text(f'{{"id": {key}, "text": "a"}}\n')
        (found,) = read(tmp_path / "corpus.jsonl", None)
        return found

    for key in ["100000000000000000001", "-7", "0.25", "-0.0", '"1e400"', "1e+16"]:
        assert json.dumps(row(key).head["id"]) == key
    for key in ["-0", "1.50", "1e400", "-1e400", "0.1000000000000000055", "NaN", "true"]:
        found = row(key)
        assert found.error is not None and "id" not in found.head, key


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("split", ["jsonl", "line", "blank", "file"])
def test_compressed_text_is_read_as_the_text(tmp_path, suffix, split):
    plain = tmp_path / "corpus.jsonl"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" * (1 + i % 3) for i, text in enumerate(TEXTS)))
    packed = tmp_path / f"corpus.jsonl{suffix}"
    if suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        packed.write_bytes(pyarrow.compress(plain.read_bytes(), "zstd", asbytes=True))
    else:
        module = importlib.import_module({".gz": "gzip", ".xz": "lzma", ".bz2": "bz2"}[suffix])
        packed.write_bytes(module.compress(plain.read_bytes()))

    def texts(path):
        return [one.text for one in read(path, None if split == "jsonl" else split)]

    assert texts(packed) == texts(plain) and texts(plain)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(_partitions.InputError, match="cannot be read"):
        texts(packed)


@pytest.mark.parametrize("module", [score, generate_many])
def test_a_bad_row_does_what_the_run_says(module, tmp_path, capsys):
    rows = [
        '{"text": "One"}',
        "{",
        '{"id": [1], "text": ""}',
        '{"id": "c", "text": 3}',
        '{"text": "\\ud800"}',
        '{"text": "Two"}',
        "1",
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(rows))
    options = ["--field", "text", *(["-n", "3"] if module is generate_many else [])]
    assert run(module, path, "-o", tmp_path / "stop", *options) == 3
    assert f"{path}@16: no JSON" in capsys.readouterr().err
    assert run(module, path, "-o", tmp_path / "skip", *options, "--on-error", "skip") == 0
    found = capsys.readouterr()
    assert "5 rows were refused" in found.err and json.loads(found.out)["refused"] == 5
    last = len("\n".join(rows[:5])) + 1
    assert [record["name"] for record in records(tmp_path / "skip")] == [f"{path}@0", f"{path}@{last}"]
    assert run(module, path, "-o", tmp_path / "record", *options, "--on-error", "record") == 0
    found = ["bad" if "error" in record else "good" for record in records(tmp_path / "record")]
    assert found == ["good", *4 * ["bad"], "good", "bad"]
    assert records(tmp_path / "record")[3]["id"] == "c"
    kept = [record for record in records(tmp_path / "record") if "error" not in record]
    assert kept == records(tmp_path / "skip")


def test_a_file_name_may_be_no_text(tmp_path, capsys):
    path = os.fsencode(tmp_path) + b"/\xff.txt"
    with open(path, "wb") as file:
        file.write(b"One")
    assert run(score, os.fsdecode(path), "-o", tmp_path / "out") == 0
    assert records(tmp_path / "out")[0]["name"] == os.fsdecode(path)


def test_generating_is_the_same_however_it_is_cut(corpus, tmp_path, capsys):
    for size in ("0.0005", "1"):
        options = ["-n", "5", "--seed", "3", "--partition-mib", size]
        assert run(generate_many, corpus, "-o", tmp_path / size, *options) == 0
    first, second = ({r["name"]: r["text"] for r in records(tmp_path / size)} for size in ("0.0005", "1"))
    assert len(first) == len(TEXTS) and first == second


def test_a_cluster_without_ray_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert _cluster.connect(None) is None
    with pytest.raises(_cluster.ClusterError, match="not installed"):
        _cluster.connect("auto")


def test_a_cluster_that_is_not_there_is_named_at_once(corpus, tmp_path, capsys):
    pytest.importorskip("ray.data")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        start = time.monotonic()
        assert score.main([str(corpus), "-o", str(tmp_path / "out"), "--device", "cpu", "--ray-address", address]) == 1
    assert f"--ray-address {address}: " in capsys.readouterr().err
    assert time.monotonic() - start < 60
