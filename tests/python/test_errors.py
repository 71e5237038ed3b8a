"""Errors are the exceptions that Python's users expect, and leave things as they were."""

import errno
from functools import partial

import numpy as np
import pytest

import mmrec
from conftest import begun, expect_errors, python


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
    session, two = begun(model, [1]), begun(model, [[1, 2], [3, 4]], batch=2)
    scorer, generator = mmrec.Scorer(model), mmrec.Generator(model, tokenizer, slots=1)
    new, fresh, load = model.new_session, model.new_session(), partial(mmrec.Model.load, device="cpu")
    draw, generate, text = session.draw, partial(session.generate, tokenizer), partial(mmrec.generate, "Once", model)
    scorers, generators = partial(mmrec.Scorer, model), partial(mmrec.Generator, model, tokenizer)
    submit, batch = generator.submit, tokenizer.encode_batch
    no_ids = [[], [1, 8192], [-1], [2**31], [2**70], [[1, 2], [3, 4]], np.array([1 + 2**32]), np.zeros((1, 2, 3), int)]
    for error, call, *wrong in [
        (ValueError, session.prefill, *({"tokens": ids} for ids in no_ids)),
        (TypeError, session.prefill, *({"tokens": ids} for ids in ([1.5], "abc", None, [True], [None]))),
        (ValueError, new, {"batch": 0}, {"batch": 2**40}, {"prefill": "fast"}),
        (TypeError, new, {"batch": True}, {"threads": True}, {"threads": "two"}),
        (TypeError, new, {"sweep_tolerance": True}, {"tempo": 1}),
        (ValueError, load, {"device": "gpu"}, {"device": "cuda:"}, {"precision": "fp8"}, {"expert": "text"}),
        (ValueError, load, {"path": "a\0"}),
        (TypeError, load, {"threads": True}, {"allow_nonfinite": 1}, {"bank": 1}),
        (ValueError, generate, {"top_k": 2**31}),
        (TypeError, generate, {"max_tokens": True}, {"max_tokens": 3.0}, {"temperature": False}, {"logprobs": 1}),
        (ValueError, text, {"top_p": 2}, {"stop": ""}),
        (TypeError, text, {"top_x": 2}),
        (ValueError, draw, {"step": -1}),
        (TypeError, draw, {"step": True}),
        (ValueError, fresh.logits, {}),
        (ValueError, fresh.recent_tokens, {"sequence": 1}),
        (ValueError, fresh.generate, {"tokenizer": tokenizer}),
        (TypeError, session.recent_tokens, {"sequence": False}),
        (mmrec.ModelError, session.restore, {"state": b""}),
        (mmrec.ModelError, submit, {"prompt": "Once", "state": b""}),
        (ValueError, two.restore, *({"state": two.save(), "recent": ids} for ids in ([1, 2], [[1], [2], [3], [4]]))),
        (TypeError, session.restore, {"state": "state"}, {"state": memoryview(b"state" * 8)[::2]}, {"state": 3}),
        (ValueError, generators, {"slots": -1}, {"memory_bytes": -1}),
        (TypeError, generators, {"slots": True}),
        (TypeError, generator.generate, {"prompts": "Once"}, {"prompts": b"Once"}),
        (TypeError, generator.as_completed, {"prompts": "Once"}),
        (ValueError, submit, {"prompt": []}),
        (TypeError, submit, {"prompt": "Once", "state": "state"}, {"prompt": [1], "start": model}),
        (TypeError, generator.cancel, {"id": True}),
        (ValueError, mmrec.Scorer, {"models": []}),
        (ValueError, scorers, {"batch": -1}, {"batch": 65537}),
        (TypeError, scorers, {"batch": True}),
        (ValueError, scorer.score, {"documents": [[1, 2], [3, 99999]]}),
        (TypeError, scorer.score, {"documents": "Once"}, {"documents": 3}),
        (TypeError, scorer.score_stream, {"documents": "Once"}),
        (TypeError, tokenizer.encode, {"text": 3}),
        (UnicodeEncodeError, tokenizer.encode, {"text": "\ud800"}),
        (ValueError, batch, {"texts": ["text"], "threads": -1}),
        (TypeError, batch, {"texts": "text"}, {"texts": ["text", 3]}, {"texts": ["Once"], "threads": True}),
        (TypeError, tokenizer.encode_stream, {"texts": "Once"}),
        (TypeError, lambda texts: list(tokenizer.encode_stream(texts)), {"texts": [None]}),
        (IndexError, tokenizer.decode, {"tokens": [8192]}),
        (IndexError, tokenizer.piece, {"token": -1}),
        (TypeError, tokenizer.piece, {"token": True}),
        (TypeError, mmrec.StreamDecoder(tokenizer).push, {"token": True}),
    ]:
        for arguments in wrong:
            with pytest.raises(error):
                call(**arguments)
                pytest.fail(f"{call} takes {arguments}")
    assert session.position == 1


def test_what_callbacks_raise_ends_the_call_and_is_raised(model, tokenizer):
    class Mine(Exception):
        pass

    def fail(*_):
        raise Mine("mine")

    def documents():
        yield [1, 2, 3]
        raise Mine("mine")

    session = model.new_session()
    expect_errors(
        (Mine, "mine", lambda: session.prefill([1] * 2000, fail)),
        (Mine, "mine", lambda: session.generate(tokenizer, on_text=fail)),
        (Mine, "mine", lambda: mmrec.Scorer(model, on_progress=fail).score([[1, 2, 3]])),
        (Mine, "mine", lambda: list(mmrec.Scorer(model).score_stream(documents()))),
    )
    assert 0 < session.position < 2000


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
    run = python("-W", "ignore", "-c", code)
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
    with pytest.raises(ValueError, match=r"batch: found -1, expected 0\.\.65536"):
        mmrec.Scorer(model, batch=-1)
    assert mmrec.generate("Once", model, max_tokens=np.int64(2), seed=2**64 - 1) != ""
