"""Many requests and many documents: generators, asyncio, scorers."""

import asyncio
import gc
import time
import weakref

import numpy as np
import pytest

import mmrec
from conftest import at_once, begun

PROMPTS = ["Once", "The river", "A king", "In the year", "She", "It was cold", "Why"]


@pytest.fixture()
def generator(model, tokenizer):
    return mmrec.Generator(model, tokenizer, slots=3)


def alone(model, tokenizer, prompt, **options):
    return begun(model, tokenizer.encode(prompt)).generate(tokenizer, **options)


def test_a_request_gives_what_it_gives_alone(model, tokenizer, generator):
    results = generator.generate(iter(PROMPTS), max_tokens=9, seed=4, sequence=np.uint8(250))
    for i, (prompt, result) in enumerate(zip(PROMPTS, results)):
        expected = alone(model, tokenizer, prompt, max_tokens=9, seed=4, sequence=250 + i)
        assert result.text == expected.text
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)
    assert generator.waiting == generator.running == 0 and generator.slots == 3


def test_results_come_as_they_finish_and_the_rest_can_be_left(generator):
    seen = [index for index, _ in generator.as_completed(PROMPTS, max_tokens=3)]
    assert sorted(seen) == list(range(len(PROMPTS)))
    left = generator.as_completed(PROMPTS, max_tokens=-1, eos_token_ids=[], stop=".")
    next(left)
    left.close()
    assert generator.waiting == generator.running == 0


def test_requests_go_on_from_sessions_and_bytes(model, tokenizer, generator):
    start = begun(model, tokenizer.encode("Once upon a"))
    results = {}
    for name, origin in [
        ("session", {"start": start}),
        ("bytes", {"state": start.save(), "context": start.recent_tokens()}),
    ]:
        generator.submit(" time", **origin, max_tokens=6, on_finish=lambda r, name=name: results.update({name: r}))
    generator.run()
    assert results["session"].text == results["bytes"].text != ""
    assert start.position == len(tokenizer.encode("Once upon a"))


def test_callbacks_may_submit_and_cancel(generator):
    results = []
    number = generator.submit("Once", max_tokens=-1, eos_token_ids=[], on_finish=results.append)
    generator.submit(
        "The",
        max_tokens=2,
        on_finish=lambda r: (generator.cancel(number), generator.submit("A", max_tokens=1, on_finish=results.append)),
    )
    generator.run()
    assert sorted(r.finish_reason for r in results) == ["cancelled", "length"]
    assert not generator.cancel(number)


def test_what_one_request_does_wrong_ends_that_one_alone(generator):
    results = []

    def fail(text):
        raise KeyError("mine")

    generator.submit("Once", max_tokens=5, on_text=fail, on_finish=results.append)
    generator.submit("The", max_tokens=5, on_finish=results.append)
    with pytest.raises(KeyError):
        generator.run()
    generator.run()
    assert sorted(r.finish_reason for r in results) == ["cancelled", "length"]


def test_what_a_callback_raises_comes_to_its_own_call_whichever_thread_runs_the_round(generator):
    def fail(*_):
        raise KeyError("mine")

    def work(me):
        if me % 2:
            assert len(generator.generate(PROMPTS, max_tokens=9)) == len(PROMPTS)
        else:
            with pytest.raises(KeyError, match="mine"):
                generator.generate(PROMPTS, max_tokens=9, **{("on_text", "on_token")[me // 2 % 2]: fail})

    at_once(8, work)


def test_coroutines_share_the_batch(model, tokenizer, generator):
    async def text_of(prompt):
        return "".join([piece async for piece in generator.stream(prompt, max_tokens=7)])

    async def main():
        return await asyncio.gather(*map(text_of, PROMPTS))

    for _ in range(2):  # the thread of the rounds ends and begins again
        assert asyncio.run(main()) == [alone(model, tokenizer, prompt, max_tokens=7).text for prompt in PROMPTS]


def test_coroutines_that_stop_or_fail(generator):
    async def main():
        with pytest.raises(ValueError):
            async for _ in generator.stream("Once", top_p=7):
                pass
        endless = generator.stream("Once", max_tokens=-1, eos_token_ids=[])
        await endless.__anext__()
        await endless.aclose()

        async def read_on():
            async for _ in generator.stream("The", max_tokens=-1, eos_token_ids=[]):
                pass

        task = asyncio.create_task(read_on())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "".join([p async for p in generator.stream("A king", max_tokens=3)])

    assert asyncio.run(asyncio.wait_for(main(), 60)) != ""


@pytest.mark.parametrize("name", ["on_text", "on_token", "on_finish"])
@pytest.mark.parametrize("fault", [KeyError, SystemExit])
def test_what_a_coroutines_callback_raises_comes_to_it_and_to_no_other(generator, name, fault):
    def fail(*_):
        raise fault("mine")

    async def faulty(call):
        with pytest.raises(fault, match="mine"):
            await call(max_tokens=5, **{name: fail})

    async def read(**options):
        return "".join([piece async for piece in generator.stream("Once", **options)])

    async def complete(**options):
        return (await generator.complete("Once", **options)).text

    async def main():
        return (await asyncio.gather(faulty(read), faulty(complete), read(max_tokens=9), complete(max_tokens=9)))[2:]

    texts = asyncio.run(main())
    assert texts[0] == texts[1] != ""


def test_a_coroutine_has_the_whole_result(model, tokenizer, generator):
    seen = []
    options = {"max_tokens": 7, "top_logprobs": 2, "on_text": seen.append}
    result = asyncio.run(generator.complete("Once", **options, on_finish=seen.append))
    assert result.text == alone(model, tokenizer, "Once", max_tokens=7).text == "".join(seen[:-1])
    assert result is seen[-1] and result.finish_reason == "length" and result.top_tokens.shape == (7, 2)
    stopped = asyncio.run(generator.complete("Once", on_finish=lambda result: False, on_token=lambda *_: False))
    assert stopped.finish_reason == "cancelled"
    with pytest.raises(ValueError, match="top_p"):
        asyncio.run(generator.complete("Once", top_p=7))


def test_what_refers_to_itself_by_a_callback_goes(model, tokenizer):
    def generator_of_a_request():
        generator = mmrec.Generator(model, tokenizer, slots=1)
        generator.submit(
            "Once", on_text=lambda _: generator, on_token=lambda *_: generator, on_finish=lambda _: generator
        )
        return generator

    def generator_of_a_stream():
        generator = mmrec.Generator(model, tokenizer, slots=1)
        generator.me = generator
        asyncio.run(generator.complete("Once", max_tokens=2, on_finish=lambda _: generator))
        return generator

    def scorer():
        made = []
        made.append(mmrec.Scorer(model, on_progress=lambda *_: made))
        return made[0]

    for make in (generator_of_a_request, generator_of_a_stream, scorer):
        gone = [weakref.ref(make()) for _ in range(3)]
        for _ in range(50):  # the thread of the rounds lets go a little later
            gc.collect()
            if not any(one() for one in gone):
                break
            time.sleep(0.05)
        assert not any(one() for one in gone), make.__name__
    kept = generator_of_a_request()
    gc.collect()
    kept.run()  # what is in use is not collected


def test_scores_come_as_they_are_made(model):
    documents = [[5] * 40] * 300
    scored = []
    scores = mmrec.Scorer(model, threads=1, on_progress=lambda tokens, nll: scored.append(tokens)).score_stream(
        iter(documents)
    )
    next(scores)
    assert sum(scored) < 39 * 200
    assert len(list(scores)) == 299


def test_documents_come_in_order_and_as_they_are_wanted(model):
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, 8192, size) for size in [5, 700, 1, 0, 33, 2]]
    scorer = mmrec.Scorer(model)
    listed = scorer.score(documents)
    for a, b, document in zip(listed, scorer.score_stream(iter(documents)), documents):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.complete and len(a.logprobs) == max(0, len(document) - 1)
    left = scorer.score_stream(iter(documents))
    next(left)
    left.close()
    assert len(scorer.score([[1, 2]])) == 1


def test_a_cancelled_scorer_hands_over_what_is_complete(model):
    seen = []
    scorer = mmrec.Scorer(model, on_progress=lambda tokens, nll: bool(seen.append((tokens, nll))), batch=1)
    scores = scorer.score([[1] * 2000, [1, 2]])
    assert seen and not scores[0].complete
