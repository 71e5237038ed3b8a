"""The threads of the package, and iterators over the results of a call that hands them over piece by piece.

The call runs in a thread of its own and waits when its reader falls behind. When the reader stops early (the iterator
is closed or dropped), the call is told to end. It has ended when the iterator has.

Must stay true: no thread is inside the extension when the interpreter ends. Python would end such a thread in the midst
of C++, which aborts the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any, Callable, Generator, TypeVar

from . import _mmrec

T = TypeVar("T")

_MOST_SECONDS = 10.0  # that the end of the interpreter waits for calls
_running: dict[threading.Thread, Callable[[], None]] = {}  # threads of the package, and how to tell each to end
_has_ended = False


def start_thread(work: Callable[[], None], stop: Callable[[], None], name: str) -> threading.Thread:
    """Starts a thread. At the end of the interpreter stop() is called, and the interpreter waits for the thread. Raises
    RuntimeError if no thread can be started."""
    if _has_ended:
        raise RuntimeError("the interpreter is ending")

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _running[thread]
        raise
    return thread


@atexit.register
def _end() -> None:
    global _has_ended
    _has_ended = True
    left = dict(_running)
    for stop in left.values():
        stop()
    _mmrec._end_calls(_MOST_SECONDS)
    for thread in left:
        thread.join(1)


def iterate(
    call: Callable[[Callable[[T], bool]], object], stop: Callable[[], None] = lambda: None, ahead: int = 256
) -> Generator[T, None, None]:
    """Yields the pieces that `call` hands to its argument, which answers whether to go on. Raises what `call` raises.
    `stop` is called when the reader has gone, because a call may take long between two pieces."""
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

    def leave() -> None:
        closed.set()
        has_room.set()
        stop()

    thread = start_thread(work, leave, "mmrec stream")
    try:
        while (piece := pieces.get()) is not end:
            if not has_room.is_set() and pieces.qsize() <= ahead // 2:
                has_room.set()
            yield piece
        if faults:
            raise faults[0]
    finally:
        leave()
        thread.join()
