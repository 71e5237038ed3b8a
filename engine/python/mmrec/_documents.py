"""Documents as mmrec-ppl takes them: how a text becomes tokens, and how options become models.

What must stay true: equal text gives equal tokens, and so equal figures, here and in the programs (apps/pairs.cpp,
apps/corpus.cpp).
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from . import _mmrec

Ids = npt.NDArray[np.int32]


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


def encode_rolling(tokenizer: _mmrec.Tokenizer, text: str) -> Ids:
    """A whole document after the prefix token, as `mmrec-ppl --mode rolling`; without one its first token is context."""
    prefix = prefix_token(tokenizer)
    if prefix is None:
        return tokenizer.encode(text, add_bos=False)
    return np.concatenate([np.asarray([prefix], np.int32), tokenizer.encode(text, add_bos=False)])


def encode_pair(tokenizer: _mmrec.Tokenizer, context: str, continuation: str) -> tuple[Ids, int]:
    """Tokens of both texts and how many are of the context, as `mmrec-ppl --pairs`.

    Both are encoded together and cut where the context alone ends; white space at its end begins the continuation. A
    context without tokens is the prefix token. Raises ValueError where there is none.
    """
    kept = context.rstrip()
    ids = tokenizer.encode(kept) if kept else np.empty(0, np.int32)
    skipped = len(ids)
    if skipped == 0:
        prefix = prefix_token(tokenizer)
        if prefix is None:
            raise ValueError("context: found no tokens, expected some, as the tokenizer has neither BOS nor EOS")
        ids = np.asarray([prefix], np.int32)
    whole = tokenizer.encode(context + continuation, add_bos=bool(kept))
    return np.concatenate([ids, whole[skipped:]]), len(ids)
