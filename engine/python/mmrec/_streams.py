"""Calls that hand over what they make piece by piece, turned into iterators.

The call runs in a thread of its own and waits when its reader falls behind. When the reader stops early (the iterator is
closed or dropped) the call is told to end, and has ended when the iterator has.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterator, TypeVar

if TYPE_CHECKING:
    from . import _mmrec

T = TypeVar("T")


def iterate(
    call: Callable[[Callable[[T], bool]], object], stop: Callable[[], None] = lambda: None, ahead: int = 256
) -> Generator[T, None, None]:
    """Yields what `call` hands to its argument, which answers whether to go on. Raises what `call` raises. `stop` is
    called when the reader has gone, for a call that is long between two pieces."""
    pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
    has_room = threading.Event()
    closed = threading.Event()
    end = object()
    faults: list[BaseException] = []

    def emit(piece: object) -> bool:
        while pieces.qsize() >= ahead and not closed.is_set():
            has_room.clear()
            if pieces.qsize() >= ahead:  # else the reader has looked before
                has_room.wait(timeout=0.1)
        pieces.put(piece)
        return not closed.is_set()

    def work() -> None:
        try:
            call(emit)
        except BaseException as fault:  # handed to the reader
            faults.append(fault)
        pieces.put(end)

    thread = threading.Thread(target=work, name="mmrec stream", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not end:
            if not has_room.is_set() and pieces.qsize() <= ahead // 2:
                has_room.set()
            yield piece
        if faults:
            raise faults[0]
    finally:
        closed.set()
        has_room.set()
        stop()
        thread.join()


def session_stream(session: _mmrec.Session, tokenizer: _mmrec.Tokenizer, **options: Any) -> Iterator[str]:
    """Session.stream."""
    on_text = options.pop("on_text", None)

    def call(emit: Callable[[str], bool]) -> object:
        def piece(text: str) -> bool:
            return emit(text) and (on_text is None or on_text(text) is not False)

        return session.generate(tokenizer, on_text=piece, **options)

    return iterate(call)
