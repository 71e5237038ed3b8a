"""Sessions and models: shapes, state, options, pickling."""

import pickle

import numpy as np
import pytest

import mmrec
from conftest import begun

IDS = [1, 5571, 1169, 262, 660]


def test_tokens_come_in_every_kind_of_integers(model):
    expected = None
    arrays = [np.array(IDS, dtype) for dtype in (int, np.int32, np.uint16)]
    for ids in [IDS, tuple(IDS), *arrays, [IDS], np.array(IDS * 2)[:5]]:
        session = begun(model, ids)
        assert session.position == 5
        expected = session.logits() if expected is None else expected
        np.testing.assert_array_equal(session.logits(), expected)
        np.testing.assert_array_equal(session.recent_tokens(), IDS)


def test_a_strided_array_and_columns_mean_what_numpy_says(model):
    table = np.array([IDS, IDS[::-1]])
    session, single = begun(model, np.asfortranarray(table), batch=2), begun(model, table[1])
    np.testing.assert_allclose(session.logits()[1], single.logits()[0], atol=1e-4)


def test_results_are_the_callers(model):
    session = begun(model, IDS)
    logits = session.logits()
    kept = logits.copy()
    session.step([5])
    del session
    np.testing.assert_array_equal(logits, kept)
    logits[:] = 0


def test_state_goes_on_to_the_bit(model, tokenizer):
    session = begun(model, IDS)
    state, branch = session.save(), session.clone()
    for kind in (bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)):
        other = model.new_session()
        other.restore(kind(state), IDS)
    texts = [s.generate(tokenizer, max_tokens=12, repetition_penalty=1.2, seed=3) for s in (session, other, branch)]
    assert texts[0].text == texts[1].text == texts[2].text
    np.testing.assert_array_equal(texts[0].logprobs, texts[1].logprobs)
    session.reset()
    assert session.position == 0


def test_drawing_is_a_function_of_seed_and_step(model):
    session = begun(model, [IDS] * 3, batch=3)
    tokens, logprobs = session.draw(5, seed=9, top_k=0)
    again, _ = session.draw(5, seed=9, top_k=0, logprobs=False)
    assert tokens.dtype == np.int32 and logprobs.dtype == np.float32 and tokens.shape == (3,)
    np.testing.assert_array_equal(tokens, again)
    greedy, _ = session.draw(0, temperature=0)
    np.testing.assert_array_equal(greedy, session.logits().argmax(axis=1))


def test_generating_reports_what_was_asked_for(model, tokenizer):
    seen, pieces = [], []
    result = begun(model, IDS).generate(
        tokenizer, max_tokens=8, top_logprobs=3, on_text=pieces.append, on_token=lambda *token: seen.append(token)
    )
    assert result.finish_reason == "length" and result.error == "" and "".join(pieces) == result.text
    assert [t for t, _ in seen] == result.tokens.tolist() and result.top_tokens.shape == (8, 3)
    assert (np.diff(result.top_logprobs, axis=1) <= 0).all()
    assert "".join(begun(model, IDS).stream(tokenizer, max_tokens=8)) == result.text
    word = result.text.split()[1]
    stopped = begun(model, IDS).generate(tokenizer, max_tokens=8, stop=word, logprobs=False)
    assert stopped.finish_reason == "stop" and word not in stopped.text and stopped.logprobs.size == 0
    assert begun(model, IDS).generate(tokenizer, max_tokens=8, stop=word.encode()).text == stopped.text
    assert begun(model, IDS).generate(tokenizer, on_text=lambda text: False).finish_reason == "cancelled"
    assert (
        begun(model, IDS).generate(tokenizer, max_tokens=3, eos_token_ids=[int(result.tokens[0])]).finish_reason
        == "eos"
    )


def test_a_stream_that_is_left_early_frees_its_session(model, tokenizer):
    session = begun(model, IDS)
    stream = session.stream(tokenizer, max_tokens=-1, eos_token_ids=[])
    next(stream)
    stream.close()
    assert session.position > 5


def test_models_and_tokenizers_are_pickled_by_path_and_nothing_else_is(model, tokenizer):
    assert pickle.loads(pickle.dumps(model)).info == model.info
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint and again.path == tokenizer.path
    for kept in [model.new_session(), mmrec.Scorer(model), mmrec.Generator(model, tokenizer, slots=1)]:
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(kept)


def test_a_tokenizer_goes_both_ways(tokenizer):
    text = "Once upon a time — ein Märchen 😀"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids[0] == tokenizer.bos_id and tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode(text.encode(), add_bos=False), ids[1:])
    decoder = mmrec.StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids.tolist())) + decoder.finish() == text
    assert tokenizer.piece(1).encode() == tokenizer.piece_bytes(1)


def test_many_texts_are_encoded_as_each_is(tokenizer):
    texts = ["Once upon a time", b"there was", "", "ein Märchen 😀 " * 50_000, "a dog"] + [
        f"{i} dogs" for i in range(5000)
    ]
    for options in ({}, {"add_bos": False}, {"threads": 1}, {"threads": 3}):
        add_bos = options.get("add_bos", True)
        for found in (tokenizer.encode_batch(texts, **options), list(tokenizer.encode_stream(iter(texts), **options))):
            assert len(found) == len(texts)
            for text, ids in zip(texts, found):
                assert ids.dtype == np.int32
                np.testing.assert_array_equal(ids, tokenizer.encode(text, add_bos))
    assert tokenizer.encode_batch([]) == [] and list(tokenizer.encode_stream([])) == []
    read = []
    stream = tokenizer.encode_stream(read.append(i) or str(i) for i in range(100_000))
    next(stream)
    assert len(read) < 10_000


def test_the_bundled_model_travels_along():
    assert (mmrec.bundled_model() / "config.json").is_file()
    assert mmrec.generate("Once", max_tokens=5) == mmrec.generate("Once", max_tokens=5) != ""
