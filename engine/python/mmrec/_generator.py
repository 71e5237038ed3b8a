"""mmrec.Generator: many requests at once, as lists, iterators and asyncio streams."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, Iterable, Iterator, Optional, Union

from . import _mmrec
from ._results import GenerateResult

if TYPE_CHECKING:
    import numpy.typing as npt

    Prompt = Union[str, npt.ArrayLike]


class Generator(_mmrec.Generator):
    """Runs many requests together, one token of each at a time; they join and leave a batch that keeps running.

    Generator(models, tokenizer, *, slots=0, memory_bytes=0, **session options): `models` is a Model, or several of one
    model on several GPUs; `slots` sequences run at once at most on each (0: as many as suit it, at most 64), whose states
    take at most memory_bytes (0: no limit). A request's result is that of Session.generate() on a session of its own.
    Threads may share a generator: a call waits for the round that another one runs. Raises ValueError for an option out of
    range, MemoryError, CudaError.
    """

    def generate(self, prompts: Iterable[Prompt], **options: Any) -> list[GenerateResult]:
        """Continues all prompts (str or ids each); results in their order.

        Options are Session.generate's, for all. Prompt i has the random numbers of `sequence` + i, so that equal prompts
        do not give equal texts. A request that goes wrong by itself has finish_reason "error". Raises ValueError before
        the prompt that is wrong is begun.
        """
        results = dict(self.as_completed(prompts, **options))
        return [results[index] for index in sorted(results)]

    def as_completed(self, prompts: Iterable[Prompt], **options: Any) -> Iterator[tuple[int, GenerateResult]]:
        """The same as an iterator of (index, result) as they finish. `prompts` is read as there is room. What has not
        finished when the iterator is closed is cancelled."""
        sequence = options.pop("sequence", 0)
        done: collections.deque[tuple[int, GenerateResult]] = collections.deque()
        open_requests: dict[int, int] = {}

        def receiver(index: int) -> Callable[[GenerateResult], None]:
            def receive(result: GenerateResult) -> None:
                open_requests.pop(index, None)
                done.append((index, result))

            return receive

        numbered = enumerate(prompts)
        more = True
        most = 2 * self.slots  # running, and as many ready to join
        try:
            while more or open_requests:
                while more and len(open_requests) < most:
                    for index, prompt in numbered:
                        open_requests[index] = 0
                        try:
                            open_requests[index] = self.submit(
                                prompt, on_finish=receiver(index), sequence=sequence + index, **options
                            )
                        except BaseException:
                            del open_requests[index]
                            raise
                        break
                    else:
                        more = False
                if open_requests:
                    self.run_once()
                while done:
                    yield done.popleft()
        finally:
            for request in list(open_requests.values()):
                self.cancel(request)
            while open_requests:
                self.run_once()

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Pieces of the text of one request: `async for text in generator.stream(prompt, max_tokens=64)`.

        Any number of coroutines, of any event loops, share the batch; rounds run in a thread that ends when there is
        nothing left to do. Options are submit()'s. A coroutine that is cancelled, or stops reading, cancels its request.
        Raises what submit() and the request's callbacks raise, and RuntimeError where the request ended with an error.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Union[str, GenerateResult, BaseException]] = asyncio.Queue()
        on_text = options.pop("on_text", None)
        on_finish = options.pop("on_finish", None)
        gone = threading.Event()

        def post(item: Union[str, GenerateResult, BaseException]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(pieces.put_nowait, item)

        def take_text(text: str) -> bool:
            post(text)
            return not gone.is_set() and (on_text is None or on_text(text) is not False)

        def take_result(result: GenerateResult) -> None:
            post(result)
            if on_finish is not None:
                on_finish(result)

        def submit() -> Optional[int]:
            try:
                return self.submit(prompt, on_text=take_text, on_finish=take_result, **options)
            except BaseException as fault:
                post(fault)
                return None

        request = self._rounds().add(submit, post)
        try:
            while True:
                item = await pieces.get()
                if isinstance(item, str):
                    yield item
                elif isinstance(item, BaseException):
                    raise item
                elif item.finish_reason == "error":
                    raise RuntimeError(item.error)
                else:
                    return
        finally:
            gone.set()
            request.cancel()

    _made = threading.Lock()

    def _rounds(self) -> _Rounds:
        with Generator._made:
            rounds: Optional[_Rounds] = self.__dict__.get("_rounds_of")
            if rounds is None:
                rounds = self.__dict__["_rounds_of"] = _Rounds()
            rounds.generator = self
            return rounds


class _Request:
    """A request of a stream on its way to the generator and in it."""

    def __init__(self, submit: Callable[[], Optional[int]], post: Callable[[BaseException], None]) -> None:
        self.submit = submit
        self.post = post
        self.number: Optional[int] = None
        self.cancelled = False

    def cancel(self) -> None:
        """From any thread; the thread of the rounds sees it before its next round."""
        self.cancelled = True


class _Rounds:
    """The thread that runs rounds while streams are open. It alone submits and cancels, so no event loop ever waits for a
    round."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inbox: list[_Request] = []
        self.thread: Optional[threading.Thread] = None
        self.generator: Optional[Generator] = None

    def add(self, submit: Callable[[], Optional[int]], post: Callable[[Any], None]) -> _Request:
        request = _Request(submit, post)
        with self.lock:
            self.inbox.append(request)
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="mmrec rounds", daemon=True)
                self.thread.start()
        return request

    def work(self) -> None:
        running: list[_Request] = []
        generator = self.generator
        assert generator is not None
        more = False
        while True:
            with self.lock:
                arrived, self.inbox = self.inbox, []
                if not arrived and not more:
                    self.thread = None
                    self.generator = None  # no cycle that keeps the generator
                    return
            for request in arrived:
                if not request.cancelled:
                    request.number = request.submit()
                    if request.number is not None:
                        running.append(request)
            for request in [r for r in running if r.cancelled]:
                assert request.number is not None
                generator.cancel(request.number)
                running.remove(request)
            try:
                more = generator.run_once()
            except BaseException as fault:  # a callback's, or a device's: requests it concerns have ended
                more = generator.running + generator.waiting > 0
                for request in running:
                    if not more:
                        request.post(fault)
            if not more:
                running.clear()
