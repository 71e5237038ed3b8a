"""Shared by the tests of the Python package: folders of fixtures, a reader of safetensors, references, programs.

Tests that need what is large (PyTorch, JAX, lm-evaluation-harness, Ray) are skipped where it is missing; the last line
of scripts/test-python counts them.
"""

import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

import mmrec

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TYPES = {"F32": np.float32, "I32": np.int32, "F64": np.float64, "I64": np.int64}


def read_safetensors(path):
    """name -> array of a file's tensors of the types above."""
    data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    result = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in TYPES:
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            result[name] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return result


def begun(model, ids, **options):
    """A session that has consumed `ids`."""
    session = model.new_session(**options)
    session.prefill(ids)
    return session


def records(folder):
    """Those of all partitions of a folder of results."""
    return [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def summary_of(model, tokenizer, texts):
    """The scores of texts, one by one, and the measures of them all."""
    sums, scores = mmrec.PerplexityAccumulator(), mmrec.Scorer(model).score(map(tokenizer.encode, texts))
    for text, score in zip(texts, scores):
        sums.add(score, len(text.encode()), mmrec.count_words(text))
    return scores, sums.summary()


def python(*arguments, cwd=None, **environment):
    """Runs Python, with more in its environment."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)


def ppl_records(programs, rows, *options):
    """What mmrec-ppl writes of rows of JSON, which it reads from a pipe."""
    command = [programs / "mmrec-ppl", "--device", "cpu", "-q", "--format", "jsonl", *options, "-"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    run = subprocess.run(command, input=text, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def references(xp):
    """The equations of the scans step by step, by name, for arrays of the library `xp` (NumPy or PyTorch). Each takes
    its inputs, the carry and `reverse`, and returns all states and the last."""

    def scan(step, output=lambda state: state):
        def run(*arguments):
            *inputs, carry, reverse = arguments
            inputs, states = [xp.flip(x, (-2,)) if reverse else x for x in inputs], []
            for t in range(inputs[0].shape[-2]):
                carry = step(carry, *(x[..., t, :] for x in inputs))
                states.append(output(carry))
            states = xp.stack(states, -2)
            return xp.flip(states, (-2,)) if reverse else states, carry

        return run

    return {
        "decay_scan": scan(lambda h, log_a, b: xp.exp(log_a) * h + b),
        "exp_product_scan": scan(lambda logs, gamma: logs + xp.clip(xp.log(gamma + 1e-8), -50.0, 0.0), xp.exp),
        "logsumexp_scan": scan(xp.logaddexp),
    }


def logprobs(logits, targets, grad):
    """Log-probs of targets by NumPy in float64, and their derivative."""
    logits = logits.astype(np.float64)
    soft = np.exp(logits - logits.max(-1, keepdims=True))
    soft /= soft.sum(-1, keepdims=True)
    hot = np.arange(logits.shape[-1]) == targets[..., None]
    return np.log(soft[hot].reshape(targets.shape)), grad[..., None] * (hot - soft)


def expect_errors(*cases):
    """Each of `cases` is an exception, its message and the call that raises it."""
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def at_once(count, work):
    """Calls work(0), work(1), ... in threads of their own."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def true_in_a_fork(check):
    """Whether check() is true in a process that is forked off; fails where it hangs."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(not check()))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    return child.exitcode == 0


@pytest.fixture(scope="session")
def model():
    return mmrec.Model.load(device="cpu")


@pytest.fixture(scope="session")
def tokenizer():
    return mmrec.Tokenizer.load()


@pytest.fixture(scope="session")
def programs():
    """The folder of mmrec-ppl and mmrec-generate."""
    for folder in [os.environ.get("MMREC_PROGRAMS", ""), ROOT / "build/cpu/apps", ROOT / "build/cuda/apps"]:
        if folder and (pathlib.Path(folder) / "mmrec-ppl").is_file():
            return pathlib.Path(folder)
    pytest.skip("the programs are not built (MMREC_PROGRAMS names their folder)")
