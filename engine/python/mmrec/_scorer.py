"""mmrec.Scorer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Callable, Generator, Iterable, Iterator

from . import _mmrec
from ._results import DocumentScore
from ._streams import iterate

if TYPE_CHECKING:
    import numpy.typing as npt


class Scorer(_mmrec.Scorer):
    """Scores whole documents exactly, each token once: a recurrent model needs no window.

    Scorer(models, *, batch=0, whole_calls=False, on_progress=None, **session options): `models` is a Model, or several of
    one model on several GPUs; `batch` documents are scored together at most (0: as many as suit);
    on_progress(tokens, nll) is called between chunks with what was scored since, and False of it cancels. Session
    options are those of Model.new_session(). One call at a time. Raises ValueError for an option out of range.
    """

    def score_stream(self, documents: Iterable[npt.ArrayLike]) -> Iterator[DocumentScore]:
        """Scores of `documents` (ids [T] each), in their order, while they come: memory does not grow with the corpus.

        `documents` is read in a thread of the iterator's, up to a million tokens ahead. Where the scorer is cancelled by
        on_progress, the iterator ends with the last document that is complete. Raises what score() raises and what
        `documents` raises, after the scores of what was read ahead before; what was read ahead with it is lost.
        """
        call = self._new_stream()

        def run(emit: Callable[[list[DocumentScore]], bool]) -> object:
            return self._run_stream(documents, emit, call)

        return _each(iterate(run, lambda: self._stop_stream(call), ahead=8))


def _each(blocks: Generator[list[DocumentScore], None, None]) -> Iterator[DocumentScore]:
    with contextlib.closing(blocks):
        for block in blocks:
            yield from block
