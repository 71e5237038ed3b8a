"""The MM-Rec recurrent language model: loading, generating, scoring.

>>> import mmrec
>>> print(mmrec.generate("Once"))

Model and Session are the engine's; Tokenizer, Generator (many requests at once, asyncio) and Scorer (log-probs,
perplexity) build on them. Token ids are anything that NumPy converts to integers; results are int32 arrays. Log-probs
are natural logarithms in float32. Calls that compute release the GIL. docs/python.md has more.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Optional

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
from ._methods import Scorer
from ._options import GenerateOptions, LoadOptions, SamplerOptions, SessionOptions, shows
from ._results import DocumentScore, GenerateResult, ModelInfo, PerplexitySummary, PrefillStats, bundled_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import ops as ops

__all__ = [
    "CudaError",
    "DeviceUnavailable",
    "DocumentScore",
    "GenerateOptions",
    "GenerateResult",
    "Generator",
    "LoadOptions",
    "Model",
    "ModelError",
    "ModelInfo",
    "NumericError",
    "PerplexityAccumulator",
    "PerplexitySummary",
    "PrefillStats",
    "SamplerOptions",
    "Scorer",
    "Session",
    "SessionOptions",
    "StreamDecoder",
    "Tokenizer",
    "__version__",
    "backends",
    "bundled_model",
    "count_words",
    "generate",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name == "ops":  # imported when it is used first
        return importlib.import_module("mmrec.ops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.lru_cache(maxsize=1)
def _bundled() -> tuple[Model, Tokenizer]:
    return Model.load(), Tokenizer.load()


@shows(GenerateOptions)
def generate(
    prompt: str,
    model: Optional[Model] = None,
    tokenizer: Optional[Tokenizer] = None,
    **options: Unpack[GenerateOptions],
) -> str:
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
