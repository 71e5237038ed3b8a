"""Tokenizes texts in blocks, and loads models by options."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Optional, TypeVar, Union

import numpy as np
import numpy.typing as npt

from . import _mmrec

Ids = npt.NDArray[np.int32]
T = TypeVar("T")

# Bounds of texts that are tokenized together: a second's work of one or two processors.
_MOST_CHARACTERS = 1 << 22
_MOST_TEXTS = 1 << 12


def load_models(path: Optional[str], device: str = "auto", **options: Any) -> list[_mmrec.Model]:
    """The model of folder `path` (None: the bundled one) on `device`, which may be "cuda:all". Raises as Model.load."""
    if device == "cuda:all":
        return list(_mmrec.Model.load_on_gpus(path, **options))
    return [_mmrec.Model.load(path, device=device, **options)]


def blocks_of(texts: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of texts that are tokenized together: enough to keep many processors busy, and no more."""
    block: list[T] = []
    size = 0
    for text in texts:
        block.append(text)
        size += size_of(text)
        if size >= _MOST_CHARACTERS or len(block) >= _MOST_TEXTS:
            yield block
            block, size = [], 0
    if block:
        yield block


def encode_stream(
    tokenizer: _mmrec.Tokenizer, texts: Iterable[Union[str, bytes]], add_bos: bool = True, threads: int = 0
) -> Iterator[Ids]:
    """Tokenizer.encode_stream."""
    if isinstance(texts, (str, bytes)):
        raise TypeError("texts: found one text, expected an iterable of texts")
    return (ids for block in blocks_of(texts, len) for ids in tokenizer.encode_batch(block, add_bos, threads))
