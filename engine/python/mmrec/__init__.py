"""The MM-Rec recurrent language model: loading, generating, scoring.

>>> import mmrec
>>> print(mmrec.generate("Once"))

Model and Session are the engine's; Tokenizer, Generator (many requests at once, asyncio) and Scorer (log-probs,
perplexity) build on them. Token ids go in as anything NumPy makes integers of and come out as int32 arrays; log-probs are
natural logarithms in float32. Calls that compute let the GIL go. docs/python.md has more.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

from ._bundled import bundled_model
from ._generator import Generator
from ._mmrec import (
    CudaError,
    DeviceUnavailable,
    Model,
    ModelError,
    NumericError,
    PerplexityAccumulator,
    Session,
    StreamDecoder,
    Tokenizer,
    __version__,
    backends,
    count_words,
)
from ._results import DocumentScore, GenerateResult, ModelInfo, PerplexitySummary, PrefillStats
from ._scorer import Scorer

__all__ = [
    "CudaError",
    "DeviceUnavailable",
    "DocumentScore",
    "GenerateResult",
    "Generator",
    "Model",
    "ModelError",
    "ModelInfo",
    "NumericError",
    "PerplexityAccumulator",
    "PerplexitySummary",
    "PrefillStats",
    "Scorer",
    "Session",
    "StreamDecoder",
    "Tokenizer",
    "__version__",
    "backends",
    "bundled_model",
    "count_words",
    "generate",
]


@functools.lru_cache(maxsize=1)
def _bundled() -> tuple[Model, Tokenizer]:
    return Model.load(), Tokenizer.load()


def generate(prompt: str, model: Optional[Model] = None, tokenizer: Optional[Tokenizer] = None, **options: Any) -> str:
    """The text that follows `prompt`, by the bundled model (loaded once) or another.

    Options are Session.generate's; the same ones give the same text. Without `tokenizer` it is that of the model's
    folder. Raises what Model.load and Session.generate raise.
    """
    if model is None:
        if tokenizer is not None:
            raise TypeError("generate: found a tokenizer without its model")
        model, tokenizer = _bundled()
    elif tokenizer is None:
        tokenizer = Tokenizer.load(model.path)
    session = model.new_session()
    session.prefill(tokenizer.encode(prompt))
    return session.generate(tokenizer, **options).text
