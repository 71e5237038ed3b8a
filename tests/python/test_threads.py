"""Threads and signals: the GIL goes while something computes, one object serves one call, Ctrl-C ends long calls."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import mmrec
from conftest import at_once, true_in_a_fork

LONG = (np.arange(60_000) % 8000).astype(np.int32)


def test_another_thread_runs_python_while_one_computes(model):
    session = model.new_session(threads=1)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (session.prefill(LONG[:20_000]), done.set()))
    thread.start()
    steps = 0
    while not done.is_set():
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert steps > 5


def test_two_threads_compute_at_once(model):
    """Each waits within its call until the other is within its own, which it never were if one held the GIL."""
    inside = [threading.Event(), threading.Event()]
    met = []

    def work(me):
        def progress(done, total):
            inside[me].set()
            met.append(inside[1 - me].wait(60))
            return False

        model.new_session(threads=1).prefill(LONG, progress)

    at_once(2, work)
    assert met == [True, True]


def test_a_session_and_a_scorer_serve_one_call(model):
    session = model.new_session()
    with pytest.raises(RuntimeError, match="in use"):
        session.prefill(LONG[:2000], lambda *_: session.step([1]))
    assert session.position < 2000
    scorer = mmrec.Scorer(model, on_progress=lambda *_: scorer.score([[1, 2]]))
    with pytest.raises(RuntimeError, match="in use"):
        scorer.score([LONG[:2000]])


def test_threads_share_a_generator(model, tokenizer):
    generator = mmrec.Generator(model, tokenizer, slots=4)
    results = {}

    def work(me):
        results[me] = [r.text for r in generator.generate(["Once", "The"], max_tokens=6)]

    at_once(3, work)
    assert results[0] == results[1] == results[2]


CALLS = {
    "prefill": "mmrec.Model.load(device='cpu').new_session(prefill='steps').prefill([5] * 50_000_000)",
    "score": "mmrec.Scorer(mmrec.Model.load(device='cpu')).score([[5] * 50_000_000])",
    "stream": "list(mmrec.Scorer(mmrec.Model.load(device='cpu')).score_stream([5] * 1000 for _ in iter(int, 1)))",
    "generate": "mmrec.generate('Once', max_tokens=-1, eos_token_ids=[])",
    "many": "mmrec.Generator(mmrec.Model.load(device='cpu'), mmrec.Tokenizer.load(), slots=2)"
    ".generate(['Once'] * 3, max_tokens=-1, eos_token_ids=[])",
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_long_call(name):
    # A shell's background jobs ignore interrupts, and what they start would too.
    code = (
        "import mmrec, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nprint('begun', flush=True)\n"
        f"try:\n    {CALLS[name]}\nexcept KeyboardInterrupt:\n    print('interrupted')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(2)
        os.kill(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"
    finally:
        process.kill()


PRELUDE = """
import asyncio, signal, sys, threading, time
import mmrec
signal.signal(signal.SIGINT, signal.default_int_handler)
model, tokenizer = mmrec.Model.load(device="cpu", threads=1), mmrec.Tokenizer.load()
generator = mmrec.Generator(model, tokenizer, slots=2, threads=1)
scorer = mmrec.Scorer(model, threads=1)
session = model.new_session(threads=1)
session.prefill([1, 2])
endless = {"max_tokens": -1, "eos_token_ids": []}
documents = ([5] * 100 for _ in iter(int, 1))

async def read(at_piece=lambda: None, **options):
    async for _ in generator.stream("Once", **options):
        at_piece()

async def leave():
    async for _ in generator.stream("Once", **endless):
        break

def begin(call):
    begun = threading.Event()
    threading.Thread(target=call, args=(lambda *_: begun.set(),), daemon=True).start()
    begun.wait()

def again_and_again(tell):
    while True:
        session.step([3])
        tokenizer.encode("Once " * 100)
        tell()
"""
ENDS = {  # code -> exit status
    "asyncio.run(read(max_tokens=4))": 0,
    "asyncio.run(generator.complete('Once', max_tokens=4))": 0,
    "asyncio.run(leave())": 0,
    "asyncio.run(asyncio.wait_for(read(**endless), 0.1))": 1,
    "asyncio.run(read(lambda: 1 // 0, **endless))": 1,
    "asyncio.run(read(lambda: signal.raise_signal(signal.SIGINT), **endless))": -signal.SIGINT,
    "asyncio.run(read(on_text=lambda text: sys.exit(3), **endless))": 3,
    "asyncio.new_event_loop().run_until_complete(generator.stream('Once', **endless).__anext__())": 0,
    "loop, stream = asyncio.new_event_loop(), generator.stream('Once', **endless); loop.run_until_complete(stream.__anext__())": 0,
    "stream = session.stream(tokenizer, **endless); next(stream)": 0,
    "scores = scorer.score_stream(documents); next(scores)": 0,
    "scores = scorer.score_stream(documents); next(scores); sys.exit(3)": 3,
    "begin(lambda tell: session.generate(tokenizer, on_text=tell, **endless))": 0,
    "begin(lambda tell: session.generate(tokenizer, on_text=lambda _: (tell(), time.sleep(0.01)), **endless))": 0,
    "begin(lambda tell: generator.generate(['Once'] * 5, on_token=tell, **endless))": 0,
    "begin(lambda tell: model.new_session().prefill([5] * 10_000_000, tell))": 0,
    "begin(again_and_again)": 0,
}


@pytest.mark.parametrize("part", range(3))
def test_the_interpreter_ends_as_it_should_whatever_is_under_way(part):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [
        (code, status, subprocess.Popen([sys.executable, "-c", PRELUDE + code], **pipes))
        for code, status in list(ENDS.items())[part::3]
    ]
    for code, status, process in runs:
        try:
            errors = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        assert process.returncode == status, code + "\n" + errors
        assert "Fatal" not in errors and "terminate" not in errors and "ending" not in errors, code + "\n" + errors


def test_a_generator_serves_a_forked_process_unless_it_was_in_use(model, tokenizer):
    generator = mmrec.Generator(model, tokenizer, slots=2)

    async def complete():
        return (await generator.complete("Once", max_tokens=4)).text

    text = asyncio.run(complete())
    while any(thread.name == "mmrec rounds" for thread in threading.enumerate()):
        time.sleep(0.001)
    assert true_in_a_fork(lambda: asyncio.run(complete()) == text)

    def is_refused():
        with pytest.raises(RuntimeError, match="forked"):
            asyncio.run(complete())
        return True

    in_round, go_on = threading.Event(), threading.Event()
    wait = {"on_text": lambda _: (in_round.set(), go_on.wait()), "max_tokens": 2}
    thread = threading.Thread(target=lambda: generator.generate(["Once"], **wait))
    thread.start()
    in_round.wait()
    assert true_in_a_fork(is_refused)
    go_on.set()
    thread.join()
