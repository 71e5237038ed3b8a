"""mmrec.Scorer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Callable, Generator, Iterable, Iterator, Optional, Union

from . import _mmrec
from ._options import SessionOptions, shows
from ._results import DocumentScore
from ._streams import iterate

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack


class Scorer(_mmrec.Scorer):
    """Scores whole documents exactly, each token once: a recurrent model needs no window.

    `models` is a Model, or several of one model on several GPUs. At most `batch` documents are scored together (0: as many
    as suit). on_progress(tokens, nll) is called between chunks with what was scored since, and False of it cancels. The
    other options are those of Model.new_session(). One call at a time. Raises ValueError for an option out of range.
    """

    @shows(SessionOptions)
    def __init__(
        self,
        models: Union[_mmrec.Model, Iterable[_mmrec.Model]],
        *,
        batch: int = 0,
        whole_calls: bool = False,
        on_progress: Optional[Callable[[int, float], object]] = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(models, batch=batch, whole_calls=whole_calls, on_progress=on_progress, **options)

    def score_stream(self, documents: Iterable[npt.ArrayLike]) -> Iterator[DocumentScore]:
        """Scores of `documents` (ids [T] each), in their order, each as soon as it and those before it are done. Memory does
        not grow with the corpus.

        `documents` is read in a thread of the iterator's, up to a million tokens ahead, and on the CPU 256 documents. Where
        the scorer is cancelled by on_progress, the iterator ends with the last document that is complete. Raises what
        score() raises and what `documents` raises, after the scores of what was read ahead before; what was read ahead with
        it is lost.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError("documents: found one text, expected an iterable of token ids")
        call = self._new_stream()

        def run(emit: Callable[[list[DocumentScore]], bool]) -> object:
            return self._run_stream(documents, emit, call)

        return _each(iterate(run, lambda: self._stop_stream(call), ahead=32))


def _each(blocks: Generator[list[DocumentScore], None, None]) -> Iterator[DocumentScore]:
    with contextlib.closing(blocks):
        for block in blocks:
            yield from block
