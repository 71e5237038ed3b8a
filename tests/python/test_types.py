"""The stubs say what is there: mypy takes the package and its users' code, and each name of the extension is in its
stub."""

import inspect
import pathlib
import typing

import pytest

import mmrec
from conftest import ROOT, python
from mmrec._options import RequestOptions

pytest.importorskip("mypy")

USER = """
import asyncio
from typing import TYPE_CHECKING

import numpy as np

import mmrec

if TYPE_CHECKING:
    from typing_extensions import Unpack

model: mmrec.Model = mmrec.Model.load(device="cpu")
tokenizer = mmrec.Tokenizer.load()
session = model.new_session(2, threads=1)
session.prefill([[1, 2], [3, 4]], on_progress=lambda done, total: True)
best: np.int64 = np.argmax(session.logits())
result: mmrec.GenerateResult = session.generate(tokenizer, stop=b"a", eos_token_ids=np.array([2]))
mmrec.Model.load_on_gpus(gpus=np.arange(2))
texts: list[str] = [r.text for r in mmrec.Generator(model, tokenizer).generate(["a", [1, 2]])]
total: float = sum(s.nll for s in mmrec.Scorer(model).score_stream([[1, 2]]))

session.restore(bytearray(session.save()))
mmrec.ops.logsumexp_scan(np.zeros((1, 2, 3), np.float32))

def greedy(prompt: str, **options: "Unpack[mmrec.GenerateOptions]") -> str:
    options["temperature"] = 0
    return mmrec.generate(prompt, **options)

async def main(generator: mmrec.Generator) -> str:
    whole: mmrec.GenerateResult = await generator.complete("Once", max_tokens=3, start=session)
    return whole.text + "".join([piece async for piece in generator.stream("Once", stop=["a"])])
"""
REFUSED = """
session.prefill()
mmrec.Model.load(devise="cpu")
mmrec.Model.load_on_gpus(precision="fp8")
model.new_session(thread=1)
session.draw(0, top_kk=1)
session.generate(tokenizer, max_token=3)
session.stream(tokenizer, temperature="hot")
mmrec.generate("Once", max_token=3)
mmrec.Scorer(model, sweeps=3)
mmrec.Generator(model, tokenizer, sweeps=3)
mmrec.Generator(model, tokenizer).generate(["a"], max_token=3)
mmrec.Generator(model, tokenizer).as_completed(["a"], on_finish=print)
mmrec.Generator(model, tokenizer).submit("a", max_token=3)
mmrec.Generator(model, tokenizer).stream("a", max_token=3)
mmrec.Generator(model, tokenizer).complete("a", max_token=3)
"""


TORCH = """
class Tensor:
    def mean(self) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
    def backward(self) -> None: ...
"""
TORCH_USER = """
from torch import Tensor

from mmrec.torch import decay_scan, exp_product_scan, logsumexp_scan, token_logprobs

def loss(gates: Tensor, values: Tensor, targets: Tensor) -> Tensor:
    h, last = decay_scan(gates, values, return_carry=True)
    y: Tensor = logsumexp_scan(exp_product_scan(decay_scan(gates, values, last)))
    return -token_logprobs(y, targets).mean()
"""


def test_the_package_and_a_users_program_pass_mypy(tmp_path):
    own = ROOT.glob("engine/python/mmrec/*.py")
    run = python("-m", "mypy", "--ignore-missing-imports", "--cache-dir", tmp_path / "own", *own, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    program = tmp_path / "user.py"
    program.write_text(USER)
    strictly = ("-m", "mypy", "--cache-dir", tmp_path, "--strict", program)
    run = python(*strictly, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    program.write_text(USER + REFUSED)
    found = python(*strictly, cwd=ROOT).stdout
    first = USER.count("\n") + 2
    for line, text in enumerate(REFUSED.strip().splitlines(), first):
        assert f"user.py:{line}: error" in found, text


def test_a_program_that_uses_the_operators_of_pytorch_passes_mypy(tmp_path):
    (tmp_path / "torch.pyi").write_text(TORCH)  # in the place of a large package
    (tmp_path / "user.py").write_text(TORCH_USER)
    run = python("-m", "mypy", "--strict", "user.py", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


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


def test_signatures_name_the_options():
    many = mmrec.Generator
    for option, calls in {
        "precision": (mmrec.Model.load, mmrec.Model.load_on_gpus),
        "prefill": (mmrec.Model.new_session, mmrec.Scorer, many),
        "top_p": (mmrec.Session.draw, mmrec.Session.generate, mmrec.Session.stream, mmrec.generate),
        "stop": (mmrec.Session.generate, mmrec.Session.stream, mmrec.generate, many.generate, many.as_completed),
        "state": (many.submit, many.stream, many.complete),
    }.items():
        for call in calls:
            parameters = inspect.signature(call).parameters.values()
            assert option in [p.name for p in parameters] and all(p.kind is not p.VAR_KEYWORD for p in parameters)
            assert call.__doc__.strip()


def test_hints_of_the_options_can_be_asked_for():
    for options in (mmrec.LoadOptions, mmrec.SessionOptions, mmrec.SamplerOptions, mmrec.GenerateOptions, RequestOptions):
        assert typing.get_type_hints(options).keys() == options.__annotations__.keys()


def test_the_defaults_that_signatures_show_are_the_engines(tokenizer):
    def shown_by(call):
        return {p.name: p.default for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY}

    def result(load, session_options, options):
        session = mmrec.Model.load(**{**load, "device": "cpu"}).new_session(**session_options)
        session.prefill(tokenizer.encode("Once"))
        return session.generate(tokenizer, **options)

    own = result({}, {}, {})
    shown = result(*map(shown_by, (mmrec.Model.load, mmrec.Model.new_session, mmrec.Session.generate)))
    assert shown.text == own.text and len(shown.tokens) == len(own.tokens) and shown.finish_reason == own.finish_reason
    assert shown.logprobs.tolist() == own.logprobs.tolist()


def test_the_package_has_its_ops_and_imports_them_late():
    code = "import sys, mmrec; assert 'mmrec.ops' not in sys.modules and 'ops' in dir(mmrec); mmrec.ops.decay_scan"
    assert python("-c", code).returncode == 0
