"""The parts of Model, Session, Tokenizer and Scorer that are Python.

Methods that take options by name are functions of Python, so that help() shows the options.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterable, Iterator, Optional, TypeVar, Union

from . import _mmrec
from ._mmrec import Model, Session, Tokenizer
from ._options import GenerateOptions, LoadOptions, SamplerOptions, SessionOptions, shows
from ._streams import iterate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ._results import DocumentScore, GenerateResult

    Path = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _method(type_: type, options: Any, is_static: bool = False) -> Callable[[F], F]:
    """Makes a function a method. One without documentation keeps that of the extension's method, which it replaces."""

    def decorate(function: F) -> F:
        if function.__doc__ is None:
            function.__doc__ = getattr(type_, function.__name__).__doc__.split("\n\n", 1)[1]  # after the signature
        function.__qualname__ = f"{type_.__name__}.{function.__name__}"
        shown = shows(options)(function)
        setattr(type_, function.__name__, staticmethod(shown) if is_static else shown)
        return shown

    return decorate


_load, _load_on_gpus, _new_session = Model.load, Model.load_on_gpus, Model.new_session
_draw, _generate = Session.draw, Session.generate


@_method(Model, LoadOptions, is_static=True)
def load(path: Optional[Path] = None, **options: Unpack[LoadOptions]) -> Model:
    return _load(path, **options)


@_method(Model, LoadOptions, is_static=True)
def load_on_gpus(
    path: Optional[Path] = None, gpus: Optional[npt.ArrayLike] = None, **options: Unpack[LoadOptions]
) -> list[Model]:
    return _load_on_gpus(path, gpus, **options)


@_method(Model, SessionOptions)
def new_session(self: Model, batch: int = 1, **options: Unpack[SessionOptions]) -> Session:
    return _new_session(self, batch, **options)


@_method(Session, SamplerOptions)
def draw(
    self: Session, step: int, first_sequence: int = 0, *, logprobs: bool = True, **sampler: Unpack[SamplerOptions]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    return _draw(self, step, first_sequence, logprobs=logprobs, **sampler)


@_method(Session, GenerateOptions)
def generate(self: Session, tokenizer: Tokenizer, **options: Unpack[GenerateOptions]) -> GenerateResult:
    return _generate(self, tokenizer, **options)


@_method(Session, GenerateOptions)
def stream(self: Session, tokenizer: Tokenizer, **options: Unpack[GenerateOptions]) -> Iterator[str]:
    """generate() as an iterator of pieces of the text, which a thread of the iterator draws. The session is in use
    until the iterator ends or is closed."""
    on_text = options.pop("on_text", None)

    def call(emit: Callable[[str], bool]) -> object:
        def piece(text: str) -> bool:
            return emit(text) and (on_text is None or on_text(text) is not False)

        options["on_text"] = piece
        return _generate(self, tokenizer, **options)

    return iterate(call)


# Bounds of texts that are tokenized together: a second's work of one or two processors.
_MOST_CHARACTERS = 1 << 22
_MOST_TEXTS = 1 << 12


def blocks_of(
    texts: Iterable[T], size_of: Callable[[T], int] = lambda _: 0, most: int = _MOST_TEXTS
) -> Iterator[list[T]]:
    """Lists of texts that are tokenized together: enough to keep many processors busy, and no more than `most`. Without
    `size_of` their lengths do not count."""
    block: list[T] = []
    size = 0
    for text in texts:
        block.append(text)
        size += size_of(text)
        if size >= _MOST_CHARACTERS or len(block) >= most:
            yield block
            block, size = [], 0
    if block:
        yield block


@_method(Tokenizer, None)
def encode_stream(
    self: Tokenizer, texts: Iterable[Union[str, bytes]], add_bos: bool = True, threads: int = 0
) -> Iterator[npt.NDArray[np.int32]]:
    """encode_batch() as an iterator, for Scorer.score_stream: texts are read as they are wanted, up to some four
    million characters ahead."""
    if isinstance(texts, (str, bytes)):
        raise TypeError("texts: found one text, expected an iterable of texts")
    return (ids for block in blocks_of(texts, len) for ids in self.encode_batch(block, add_bos, threads))


def load_models(path: Optional[str], device: str = "auto", **options: Any) -> list[Model]:
    """The model of folder `path` (None: the bundled one) on `device`, which may be "cuda:all". Raises as Model.load."""
    if device == "cuda:all":
        return list(Model.load_on_gpus(path, **options))
    return [Model.load(path, device=device, **options)]


class Scorer(_mmrec.Scorer):
    """Scores whole documents exactly, each token once: a recurrent model needs no window.

    `models` is a Model, or several of one model on several GPUs. At most `batch` documents are scored together (0: as
    many as suit). on_progress(tokens, nll) is called between chunks with the tokens scored since and their loss; False
    cancels. The other options are those of Model.new_session(). One call at a time. Raises ValueError for an option out
    of range.
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
        """Scores of `documents` (ids [T] each), in their order, each as soon as it and those before it are done. Memory
        does not grow with the corpus.

        A thread of the iterator reads `documents`, up to a million tokens ahead, and on the CPU 256 documents. If
        on_progress cancels the scorer, the iterator ends with the last document that is complete. Raises what score()
        raises and what `documents` raises, after the scores of documents that were read ahead before; documents that
        were read ahead with it are lost.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError("documents: found one text, expected an iterable of token ids")
        call = self._new_stream()

        def run(emit: Callable[[list[DocumentScore]], bool]) -> object:
            return self._run_stream(documents, emit, call)

        def each(blocks: Generator[list[DocumentScore], None, None]) -> Iterator[DocumentScore]:
            with contextlib.closing(blocks):
                for block in blocks:
                    yield from block

        return each(iterate(run, lambda: self._stop_stream(call), ahead=32))
