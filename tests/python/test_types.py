"""The stubs say what is there: mypy takes the package and its users' code, stubtest compares the extension with its stub."""
import pathlib
import subprocess
import sys

import pytest

import mmrec
from conftest import ROOT

pytest.importorskip("mypy")

USER = """
import asyncio
import numpy as np
import mmrec

model: mmrec.Model = mmrec.Model.load(device="cpu")
tokenizer = mmrec.Tokenizer.load()
session = model.new_session(2, threads=1)
session.prefill([[1, 2], [3, 4]], on_progress=lambda done, total: True)
best: np.int64 = np.argmax(session.logits())
result: mmrec.GenerateResult = session.generate(tokenizer, max_tokens=3)
texts: list[str] = [r.text for r in mmrec.Generator(model, tokenizer).generate(["a", [1, 2]])]
total: float = sum(s.nll for s in mmrec.Scorer(model).score_stream([[1, 2]]))

async def main(generator: mmrec.Generator) -> str:
    return "".join([piece async for piece in generator.stream("Once")])
"""


def mypy(*arguments):
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_package_and_a_users_program_pass_mypy(tmp_path):
    own = [path for path in ROOT.glob("engine/python/mmrec/*.py") if path.stem not in ("lm_eval", "torch")]  # of untyped classes
    run = mypy("mypy", "--ignore-missing-imports", "--cache-dir", tmp_path / "own", *own)
    assert run.returncode == 0, run.stdout + run.stderr
    program = tmp_path / "user.py"
    program.write_text(USER)
    run = mypy("mypy", "--cache-dir", tmp_path, "--strict", program)
    assert run.returncode == 0, run.stdout + run.stderr
    program.write_text(USER + "\nsession.prefill()\n")
    assert mypy("mypy", "--cache-dir", tmp_path, "--strict", program).returncode == 1


def test_every_name_of_the_extension_is_in_its_stub():
    stub = (pathlib.Path(mmrec.__file__).parent / "_mmrec.pyi").read_text()
    from mmrec import _mmrec

    for name, value in vars(_mmrec).items():
        if name.startswith("__") and name != "__version__":
            continue
        assert f"class {name}" in stub or f"def {name}" in stub or f"{name}:" in stub, name
        if isinstance(value, type) and not issubclass(value, Exception):
            body = stub.split(f"class {name}:")[1].split("\nclass ")[0]
            for member in vars(value):
                if not member.startswith("__"):
                    assert f"def {member}(" in body, f"{name}.{member}"
