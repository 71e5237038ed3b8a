"""What the tests of the Python package share: fixtures' folders, a reader of safetensors, programs to compare with.

Tests that need what is large (PyTorch, JAX, lm-evaluation-harness, Ray) are skipped where it is missing; the last line of
scripts/test-python counts them.
"""

import json
import os
import pathlib
import signal
import struct
import time

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


def true_in_a_fork(check):
    """Whether check() is true in a process that is forked off; fails where it hangs."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


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
