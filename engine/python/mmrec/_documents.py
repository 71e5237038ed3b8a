"""Documents as mmrec-ppl takes them: how a text becomes tokens, and how options become models.

What must stay true: equal text gives equal tokens, and so equal figures, here and in the programs (apps/ppl/pairs.cpp,
apps/ppl/corpus.cpp).
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, TypeVar, Union

import numpy as np
import numpy.typing as npt

from . import _mmrec

Ids = npt.NDArray[np.int32]
T = TypeVar("T")

# Of texts that are tokenized together: a second's work of a processor or two.
_MOST_CHARACTERS = 1 << 22
_MOST_TEXTS = 1 << 12


def load_models(path: Optional[str], device: str = "auto", **options: Any) -> list[_mmrec.Model]:
    """The model of folder `path` (None: the bundled one) on `device`, which may be "cuda:all". Raises as Model.load."""
    if device == "cuda:all":
        if path is None:
            from ._bundled import bundled_model

            path = str(bundled_model())
        return list(_mmrec.Model.load_on_gpus(path, **options))
    return [_mmrec.Model.load(path, device=device, **options)]


def prefix_token(tokenizer: _mmrec.Tokenizer) -> Optional[int]:
    """What lm-evaluation-harness puts before a text without context: BOS, or else EOS; None where there is neither."""
    if tokenizer.bos_id >= 0:
        return int(tokenizer.bos_id)
    return int(tokenizer.eos_id) if tokenizer.eos_id >= 0 else None


def blocks_of(texts: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of what is tokenized together: as much as keeps many processors busy, and no more."""
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
    return _encode_blocks(tokenizer, texts, add_bos, threads)


def _encode_blocks(
    tokenizer: _mmrec.Tokenizer, texts: Iterable[Union[str, bytes]], add_bos: bool, threads: int
) -> Iterator[Ids]:
    for block in blocks_of(texts, len):
        yield from tokenizer.encode_batch(block, add_bos, threads)


def rolling_windows(ids: Ids, most: int) -> Iterator[tuple[Ids, int]]:
    """(tokens, how many of the last are scored) of each window of `mmrec-ppl --mode rolling --window most`."""
    last = len(ids) - 1
    for done in range(0, last, most):
        end = min(done + most, last)
        yield ids[max(0, end - most) : end + 1], end - done


def encode_rolling(tokenizer: _mmrec.Tokenizer, texts: Sequence[str], threads: int = 0) -> list[Ids]:
    """Whole documents after the prefix token, as `mmrec-ppl --mode rolling`; without one their first token is context."""
    prefix = prefix_token(tokenizer)
    ids = tokenizer.encode_batch(texts, False, threads)
    if prefix is None:
        return ids
    before = np.asarray([prefix], np.int32)
    return [np.concatenate([before, one]) for one in ids]


def encode_pairs(
    tokenizer: _mmrec.Tokenizer, pairs: Sequence[tuple[str, str]], threads: int = 0, add_bos: Optional[bool] = None
) -> list[tuple[Ids, int]]:
    """Tokens of both texts of each pair and how many are of the first, the context, as `mmrec-ppl --pairs`.

    Both are encoded together and cut where the context alone ends; white space at its end begins the continuation. A
    context without tokens is the prefix token. Raises ValueError where there is none. `add_bos`: whether BOS comes
    before a context (None: as the tokenizer does).
    """
    texts = [text for context, continuation in pairs for text in (context.rstrip(), context + continuation)]
    ids = tokenizer.encode_batch(texts, False, threads)
    first = np.asarray([tokenizer.bos_id] if (tokenizer.adds_bos if add_bos is None else add_bos) else [], np.int32)
    prefix = prefix_token(tokenizer)
    found = []
    for context, both in zip(ids[::2], ids[1::2]):
        # Without a context the two share nothing, not even what the tokenizer puts first.
        if len(context):
            before = np.concatenate([first, context])
        elif prefix is not None:
            before = np.asarray([prefix], np.int32)
        else:
            raise ValueError("context: found no tokens, expected some, as the tokenizer has neither BOS nor EOS")
        found.append((np.concatenate([before, both[len(context) :]]), len(before)))
    return found
