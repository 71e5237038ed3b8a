"""Methods of the extension's classes that take options by name: functions of Python, so that help() shows the options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Optional, TypeVar, Union

from ._mmrec import Model, Session, Tokenizer
from ._options import GenerateOptions, LoadOptions, SamplerOptions, SessionOptions, shows
from ._streams import iterate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ._results import GenerateResult

    Path = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]

F = TypeVar("F", bound=Callable[..., Any])


def _method(type_: type, options: Any, is_static: bool = False) -> Callable[[F], F]:
    """Makes a function a method, in the place of the extension's of that name, whose documentation it keeps."""

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
    path: Optional[Path] = None, gpus: Optional[Iterable[int]] = None, **options: Unpack[LoadOptions]
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
    """generate() as an iterator of pieces of the text, which a thread of the iterator draws. The session is in use until
    the iterator ends or is closed."""
    on_text = options.pop("on_text", None)

    def call(emit: Callable[[str], bool]) -> object:
        def piece(text: str) -> bool:
            return emit(text) and (on_text is None or on_text(text) is not False)

        options["on_text"] = piece
        return _generate(self, tokenizer, **options)

    return iterate(call)
