"""The options that calls take by name: their types, their defaults, and the signatures that help() shows.

What must stay true: the names and defaults are those of the engine (engine/python/src/values.cpp and model.cpp).
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterable, Literal, Optional, TypedDict, TypeVar, Union

import numpy.typing as npt  # noqa: F401 get_type_hints() looks for what types below name

from . import _mmrec
from ._results import GenerateResult  # noqa: F401

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
elif TYPE_CHECKING:
    from typing_extensions import Buffer
else:
    Buffer = Any

F = TypeVar("F", bound=Callable[..., Any])


class LoadOptions(TypedDict, total=False):
    """Options of Model.load()."""

    device: str
    precision: Literal["auto", "fp32", "fp16", "bf16", "fp32-fma"]
    batch_invariant: bool
    threads: int
    allow_nonfinite: bool
    on_warning: Optional[Callable[[str], object]]
    expert: Optional[Literal["both", "text", "code"]]
    calls: Optional[Literal["stepwise", "prompt", "whole"]]
    bank: Optional[bool]


class SessionOptions(TypedDict, total=False):
    """Options of Model.new_session(), Generator and Scorer."""

    threads: int
    prefill: Literal["auto", "sweeps", "steps"]
    sweep_tolerance: float
    max_sweeps: int


class SamplerOptions(TypedDict, total=False):
    """Options of Session.draw()."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    vocab_limit: int
    seed: int


class GenerateOptions(SamplerOptions, total=False):
    """Options of Session.generate() and of all requests of a Generator."""

    sequence: int
    max_tokens: int
    stop: Union[str, bytes, Iterable[Union[str, bytes]], None]
    eos_token_ids: "Optional[npt.ArrayLike]"
    logprobs: bool
    top_logprobs: int
    context: "Optional[npt.ArrayLike]"
    on_text: Optional[Callable[[str], object]]
    on_token: Optional[Callable[[int, float], object]]


class _RequestOptions(TypedDict, total=False):
    start: "Optional[_mmrec.Session]"
    state: "Optional[Buffer]"
    on_finish: "Optional[Callable[[GenerateResult], object]]"


class RequestOptions(_RequestOptions, GenerateOptions, total=False):
    """Options of a Generator's requests."""


#: Of the options whose default is not None; threads are those of the call.
DEFAULTS = {
    "device": "auto",
    "precision": "auto",
    "batch_invariant": False,
    "threads": 0,
    "allow_nonfinite": False,
    "prefill": "auto",
    "sweep_tolerance": 0.0,
    "max_sweeps": 64,
    **{name: default for name, default, _, _ in _mmrec.sampler_options},
    "sequence": 0,
    "max_tokens": 256,
    "stop": (),
    "logprobs": True,
    "top_logprobs": 0,
}


def shows(options: Any) -> Callable[[F], F]:
    """Decorates a function of **options: its signature names each of `options`, one of the types above or None."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=DEFAULTS.get(name),
                annotation=getattr(type_, "__forward_arg__", type_),
            )
            for name, type_ in (options.__annotations__.items() if options else ())
        ]
        function.__signature__ = signature.replace(parameters=own + named)  # type: ignore[attr-defined]
        return function

    return decorate
