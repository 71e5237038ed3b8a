"""Errors are the exceptions that Python's users expect, and leave things as they were."""

import errno
import subprocess
import sys

import numpy as np
import pytest

import mmrec
from conftest import begun


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        mmrec.Model.load(tmp_path)
    assert caught.value.errno == errno.ENOENT and str(tmp_path) in str(caught.value.filename)
    with pytest.raises(FileNotFoundError):
        mmrec.Tokenizer.load(tmp_path / "none")


def test_malformed_files_and_states(tmp_path, model):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(mmrec.ModelError, match="config.json"):
        mmrec.Model.load(tmp_path)
    session = begun(model, [1, 2])
    state = bytearray(session.save())
    state[len(state) // 2] ^= 1
    with pytest.raises(mmrec.ModelError):
        session.restore(bytes(state))
    assert session.position == 2


def test_arguments(model, tokenizer):
    generator, scorer, session = mmrec.Generator(model, tokenizer, slots=1), mmrec.Scorer(model), begun(model, [1])
    no_ids = [[], [1, 8192], [-1], [2**31], [2**70], [[1, 2], [3, 4]], np.array([1 + 2**32]), np.zeros((1, 2, 3), int)]
    for call, error in [
        *((lambda ids=ids: session.prefill(ids), ValueError) for ids in no_ids),
        *((lambda ids=ids: session.prefill(ids), TypeError) for ids in ([1.5], "abc", None, [True], [None])),
        (lambda: model.new_session(0), ValueError),
        (lambda: model.new_session(True), TypeError),
        (lambda: model.new_session(2**40), ValueError),
        (lambda: model.new_session(threads=True), TypeError),
        (lambda: model.new_session(sweep_tolerance=True), TypeError),
        (lambda: mmrec.Model.load(device="cpu", threads=True), TypeError),
        (lambda: mmrec.Model.load(device="cpu", allow_nonfinite=1), TypeError),
        (lambda: mmrec.Model.load(device="cpu", bank=1), TypeError),
        (lambda: session.generate(tokenizer, max_tokens=True), TypeError),
        (lambda: session.generate(tokenizer, max_tokens=3.0), TypeError),
        (lambda: session.generate(tokenizer, temperature=False), TypeError),
        (lambda: session.generate(tokenizer, logprobs=1), TypeError),
        (lambda: session.generate(tokenizer, top_k=2**31), ValueError),
        (lambda: session.draw(True), TypeError),
        (lambda: session.draw(-1), ValueError),
        (lambda: session.recent_tokens(False), TypeError),
        (lambda: session.restore("state"), TypeError),
        (lambda: session.restore(memoryview(b"state" * 8)[::2]), TypeError),
        (lambda: session.restore(3), TypeError),
        (lambda: generator.generate("Once"), TypeError),
        (lambda: generator.generate(b"Once"), TypeError),
        (lambda: generator.as_completed("Once"), TypeError),
        (lambda: generator.submit("Once", state="state"), TypeError),
        (lambda: generator.cancel(True), TypeError),
        (lambda: mmrec.Generator(model, tokenizer, slots=True), TypeError),
        (lambda: mmrec.Generator(model, tokenizer, memory_bytes=-1), ValueError),
        (lambda: mmrec.Scorer(model, batch=True), TypeError),
        (lambda: scorer.score("Once"), TypeError),
        (lambda: scorer.score_stream("Once"), TypeError),
        (lambda: tokenizer.encode_stream("Once"), TypeError),
        (lambda: tokenizer.encode_batch(["Once"], threads=True), TypeError),
        (lambda: tokenizer.piece(True), TypeError),
        (lambda: mmrec.StreamDecoder(tokenizer).push(True), TypeError),
        (lambda: model.new_session(prefill="fast"), ValueError),
        (lambda: model.new_session(1, tempo=1), TypeError),
        (lambda: model.new_session(threads="two"), TypeError),
        (lambda: model.new_session().logits(), ValueError),
        (lambda: model.new_session().recent_tokens(1), ValueError),
        (lambda: model.new_session().generate(tokenizer), ValueError),
        (lambda: mmrec.generate("Once", model, top_p=2), ValueError),
        (lambda: mmrec.generate("Once", model, top_x=2), TypeError),
        (lambda: mmrec.generate("Once", model, stop=""), ValueError),
        (lambda: mmrec.Model.load(device="gpu"), ValueError),
        (lambda: mmrec.Model.load(device="cuda:"), ValueError),
        (lambda: mmrec.Model.load(device="cpu", precision="fp8"), ValueError),
        (lambda: mmrec.Model.load(device="cpu", expert="text"), ValueError),
        (lambda: mmrec.Scorer([]), ValueError),
        (lambda: mmrec.Scorer(model, batch=-1), ValueError),
        (lambda: mmrec.Scorer(model).score([[1, 2], [3, 99999]]), ValueError),
        (lambda: mmrec.Scorer(model).score(3), TypeError),
        (lambda: mmrec.Generator(model, tokenizer, slots=-1), ValueError),
        (lambda: mmrec.Generator(model, tokenizer, slots=1).submit([]), ValueError),
        (lambda: mmrec.Generator(model, tokenizer, slots=1).submit([1], start=model), TypeError),
        (lambda: tokenizer.decode([8192]), IndexError),
        (lambda: tokenizer.piece(-1), IndexError),
        (lambda: tokenizer.encode(3), TypeError),
        (lambda: tokenizer.encode_batch("text"), TypeError),
        (lambda: tokenizer.encode_batch(["text", 3]), TypeError),
        (lambda: tokenizer.encode_batch(["text"], threads=-1), ValueError),
        (lambda: list(tokenizer.encode_stream([None])), TypeError),
        (lambda: tokenizer.encode("\ud800"), UnicodeEncodeError),
    ]:
        with pytest.raises(error):
            call()
        assert session.position == 1


def test_what_callbacks_raise_ends_the_call_and_is_raised(model, tokenizer):
    class Mine(Exception):
        pass

    def fail(*_):
        raise Mine

    session = model.new_session()
    with pytest.raises(Mine):
        session.prefill([1] * 2000, fail)
    assert 0 < session.position < 2000
    with pytest.raises(Mine):
        session.generate(tokenizer, on_text=fail)
    with pytest.raises(Mine):
        mmrec.Scorer(model, on_progress=fail).score([[1, 2, 3]])

    def documents():
        yield [1, 2, 3]
        raise Mine

    with pytest.raises(Mine):
        list(mmrec.Scorer(model).score_stream(documents()))


def test_a_sub_interpreter_is_refused():
    """A thread of the engine would take the GIL of the main interpreter, and the sub-interpreter would wait without
    end."""
    code = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
refused = "try:\\n    import mmrec\\nexcept ImportError as fault:\\n    print(fault, flush=True)"
interpreters.run_string(interpreters.create(), refused)
import mmrec
print(mmrec.generate("Once", max_tokens=1) != "")
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    first, _, rest = run.stdout.partition("\n")
    assert "interpreter" in first and rest == "True\n" and run.returncode == 0, run.stdout + run.stderr


def test_a_missing_device_is_named(model):
    if "cuda" not in mmrec.backends:
        with pytest.raises(mmrec.DeviceUnavailable):
            mmrec.Model.load(device="cuda")
    assert issubclass(mmrec.DeviceUnavailable, RuntimeError) and issubclass(mmrec.NumericError, ArithmeticError)
    assert issubclass(mmrec.ModelError, RuntimeError) and issubclass(mmrec.CudaError, RuntimeError)


def test_a_number_out_of_range_is_told_the_range(model):
    with pytest.raises(ValueError, match=r"seed: found -1, expected 0\.\.18446744073709551615"):
        mmrec.generate("Once", model, seed=-1)
    assert mmrec.generate("Once", model, max_tokens=np.int64(2), seed=2**64 - 1) != ""
