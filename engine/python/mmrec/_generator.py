"""mmrec.Generator: many requests at once, as lists, iterators and asyncio streams."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import operator
import sys
import threading
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, Iterable, Iterator, Optional, Union

from . import _mmrec
from ._options import GenerateOptions, RequestOptions, SessionOptions, shows
from ._results import GenerateResult
from ._streams import start_thread

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    Prompt = Union[str, npt.ArrayLike]


class Generator(_mmrec.Generator):
    """Runs many requests together, one token of each at a time; they join and leave a batch that keeps running.

    `models` is a Model, or several of one model on several GPUs. At most `slots` sequences run at once on each (0: as
    many as are fastest there, at most 1024). Half as many more, at most 64, consume their prompts before a slot is free.
    All their states take at most memory_bytes (0: no limit). A request's result is that of Session.generate() on a
    session of its own. Threads may share a generator: a call waits for the round of another call. Raises ValueError
    for an option out of range, MemoryError, CudaError.
    """

    @shows(SessionOptions)
    def __init__(
        self,
        models: Union[_mmrec.Model, Iterable[_mmrec.Model]],
        tokenizer: _mmrec.Tokenizer,
        *,
        slots: int = 0,
        memory_bytes: int = 0,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(models, tokenizer, slots=slots, memory_bytes=memory_bytes, **options)
        self._rounds = _Rounds()

    @shows(RequestOptions)
    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> int:
        """Queues a request and returns its number, from 1 on.

        prompt: a str, encoded as by Tokenizer.encode (with BOS unless it continues a state), or ids [T]. start: a
        Session of batch 1; the request continues a copy of it, so it must not move until the request runs. Or state:
        the bytes of Session.save(). on_finish receives the GenerateResult. Options are Session.generate's. Raises
        ValueError naming the field, and ModelError for a state; then nothing has changed.
        """
        return super().submit(prompt, **options)

    @shows(GenerateOptions)
    def generate(self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]) -> list[GenerateResult]:
        """Continues all prompts (str or ids each); results in their order.

        Options are Session.generate's, for all. Prompt i has the random numbers of `sequence` + i, so that equal
        prompts do not give equal texts. A request that fails on its own has finish_reason "error". Raises TypeError for
        a single str, and ValueError for a wrong prompt before it is begun.
        """
        results = dict(self.as_completed(prompts, **options))
        return [results[index] for index in sorted(results)]

    @shows(GenerateOptions)
    def as_completed(
        self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> Iterator[tuple[int, GenerateResult]]:
        """The same as an iterator of (index, result) as they finish. `prompts` is read as there is room. Closing the
        iterator cancels requests that have not finished."""
        if isinstance(prompts, (str, bytes)):
            raise TypeError("prompts: found one text, expected an iterable of prompts")
        return self._as_completed(prompts, options)

    def _as_completed(
        self, prompts: Iterable[Prompt], options: GenerateOptions
    ) -> Iterator[tuple[int, GenerateResult]]:
        sequence = operator.index(options.pop("sequence", 0))
        faults: list[BaseException] = []  # another thread that runs the round must not raise them
        if callable(on_text := options.get("on_text")):
            options["on_text"] = _guarded(faults.append, on_text)
        if callable(on_token := options.get("on_token")):
            options["on_token"] = _guarded(faults.append, on_token)
        numbered = enumerate(prompts)
        more = True
        most = 2 * self.slots  # running, and as many ready to join
        numbers: dict[int, int] = {}  # of requests whose results are not handed over, by index
        done: collections.deque[tuple[int, GenerateResult]] = collections.deque()
        try:
            while more or numbers:
                while more and len(numbers) < most:
                    index, prompt = next(numbered, (-1, ""))
                    if more := index >= 0:
                        options["sequence"] = sequence + index
                        on_finish = functools.partial(lambda index, result: done.append((index, result)), index)
                        numbers[index] = self.submit(prompt, on_finish=on_finish, **options)
                if len(done) < len(numbers):
                    self.run_once()
                while done and not faults:
                    index, result = done.popleft()
                    del numbers[index]
                    yield index, result
                if faults:
                    raise faults[0]
        finally:
            for number in numbers.values():
                self.cancel(number)
            while len(done) < len(numbers):
                self.run_once()

    @shows(RequestOptions)
    async def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncIterator[str]:
        """Pieces of the text of one request: `async for text in generator.stream(prompt, max_tokens=64)`.

        Any number of coroutines, of any event loops, share the batch; rounds run in a thread that ends when nothing is
        left to do. Arguments are submit()'s. A coroutine that is cancelled, or stops reading, cancels its request.
        Raises the exceptions of submit() and of the request's callbacks, and RuntimeError if the request ended with an
        error.
        """
        request = self._rounds.begin(self, prompt, options, wants_text=True)
        try:
            while isinstance(item := await request.next(), str):
                yield item
        finally:
            request.cancelled = True

    @shows(RequestOptions)
    async def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerateResult:
        """The whole result of one request: `result = await generator.complete(prompt, max_tokens=64)`. Otherwise it is
        like stream()."""
        request = self._rounds.begin(self, prompt, options, wants_text=False)
        try:
            result = await request.next()
            assert not isinstance(result, str)
            return result
        finally:
            request.cancelled = True


def _guarded(
    post: Callable[[BaseException], object], *callbacks: Optional[Callable[..., object]]
) -> Callable[..., bool]:
    """Calls all of `callbacks` until one returns False or raises; posts the exception. Returns whether to go on."""

    def call(*arguments: Any) -> bool:
        try:
            return all(c is None or c(*arguments) is not False for c in callbacks)
        except BaseException as fault:
            post(fault)
            return False

    return call


class _Request:
    """A request of a coroutine. The thread of the rounds posts to the coroutine: pieces, then the result; or the
    exception of a callback."""

    def __init__(self, options: RequestOptions, wants_text: bool) -> None:
        """Replaces the callbacks among `options`."""
        self.cancelled = False  # the thread of the rounds sees it before its next round
        self.number = 0
        self._on_finish = options.get("on_finish")
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Union[str, GenerateResult, BaseException]] = asyncio.Queue()
        on_text, on_token = options.get("on_text"), options.get("on_token")
        if wants_text:
            options["on_text"] = _guarded(self.post, self._is_wanted, self.post, on_text)
        elif on_text is not None:
            options["on_text"] = _guarded(self.post, self._is_wanted, on_text)
        if on_token is not None:
            options["on_token"] = _guarded(self.post, self._is_wanted, on_token)
        options["on_finish"] = self._finish

    async def next(self) -> Union[str, GenerateResult]:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        if not isinstance(item, str) and item.finish_reason == "error":
            raise RuntimeError(item.error)
        return item

    def post(self, item: Union[str, GenerateResult, BaseException]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def _finish(self, result: GenerateResult) -> None:
        try:
            if self._on_finish is not None:
                self._on_finish(result)
            self.post(result)
        except BaseException as fault:
            self.post(fault)

    def _is_wanted(self, *_: Any) -> bool:
        return not self.cancelled


class _Rounds:
    """The thread that runs rounds while coroutines wait. It alone submits and cancels, so event loops never wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inbox: list[tuple[_Request, Prompt, RequestOptions]] = []
        self._thread: Optional[threading.Thread] = None
        self._is_over = False

    def begin(self, generator: Generator, prompt: Prompt, options: RequestOptions, wants_text: bool) -> _Request:
        request = _Request(options, wants_text)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a process that was forked off has none
                self._thread = start_thread(lambda: self._work(generator), self._end, "mmrec rounds")
            self._inbox.append((request, prompt, options))
        return request

    def _end(self) -> None:
        self._is_over = True

    def _work(self, generator: Generator) -> None:
        running: list[_Request] = []
        more = False
        while True:
            with self._lock:
                arrived, self._inbox = self._inbox, []
                if self._is_over or (not arrived and not more):
                    self._thread = None
                    return
            for request, prompt, options in arrived:
                if request.cancelled:
                    continue
                try:
                    request.number = generator.submit(prompt, **options)
                    running.append(request)
                except BaseException as fault:
                    request.post(fault)
            for request in [r for r in running if r.cancelled]:
                generator.cancel(request.number)
                running.remove(request)
            if not running and not more:
                continue
            try:
                more = generator.run_once()
            except BaseException as fault:  # of a device, or of a callback of somebody else's request
                more = generator.running + generator.waiting > 0
                if not more:
                    for request in running:
                        request.post(fault)
                if not self._is_over:
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            if not more:
                running.clear()
