"""The kernels by themselves, on arrays of any library that speaks DLPack: NumPy, PyTorch, JAX, CuPy.

Nothing is copied. Results are arrays of the first argument's library, on its device. On a GPU the call enqueues its
work on that library's current stream (`stream=` names another one) and returns; JAX shows no streams, so with its
arrays a call waits. Operands may have any strides if channels, the last axis, lie side by side. `out` must be writable
and share no memory with inputs, except that it may be exactly the input that a function names.

Types are float32, float16 and bfloat16; arithmetic is float32 or wider. Scans take [..., time, dim] of two to four
dimensions, and each channel is a sequence of its own. `carry` is the state before the first step, float32 [..., dim]; a
run cut into calls that hand the carry on gives what one call gives, within rounding. `reverse=True` runs from the last
step to the first. `threads` are the CPU's, 0 for all that the process may use.

Errors: TypeError for another type or no array, ValueError naming argument, found and expected, mmrec.CudaError,
mmrec.DeviceUnavailable, MemoryError. Except for a CUDA error nothing is written before. docs/python.md has examples.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, Optional, Tuple

import numpy as np

from . import _mmrec

__all__ = ["decay_scan", "exp_product_scan", "logsumexp_scan", "token_logprobs", "token_logprobs_backward"]

# An array, or its description for the extension: (address, shape, strides, type's code, bits, device type, device,
# whether it is read-only). Codes and device types are DLPack's numbers.
Array = Any

_EXP_PRODUCT, _LOGSUMEXP, _DECAY = range(3)
_DEVICES = {"cpu": 1, "cuda": 2}
_TYPES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "int64": (0, 64)}


class _Library:
    """A library by the array API standard: x.__array_namespace__() makes arrays, x.__dlpack__() describes them."""

    def operand(self, x: Array) -> Any:
        """What the extension takes for `x`."""
        return x

    def written(self, x: Array) -> Any:
        """The same for an array of the caller's that is written to."""
        return self.operand(x)

    def empty(self, x: Array, shape: Tuple[int, ...], floats: bool) -> Array:
        """A new array beside `x`, of its type or of float32."""
        space = x.__array_namespace__()
        return space.empty(shape, dtype=space.float32 if floats else x.dtype, device=x.device)

    def stream(self, x: Array) -> int:
        """The current stream of the device of `x`."""
        return 0

    def finish(self, x: Array) -> None:
        """Called when the work that writes `x` is enqueued."""


class _Numpy(_Library):
    def operand(self, x: Array) -> Any:
        if type(x) is np.ndarray and x.dtype.isbuiltin == 1:  # of this machine's byte order
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("found a masked array, of which kernels would see the masked entries, expected a plain one")
        if not x.dtype.isnative:
            raise TypeError(f"found {x.dtype.str} of the other byte order, expected this machine's")
        if x.dtype.kind != "V" or x.dtype.name != "bfloat16":
            return x
        bits = x.view(np.uint16)  # bfloat16 of ml_dtypes, which NumPy itself cannot describe
        strides, kind = [s // 2 for s in bits.strides], _TYPES["bfloat16"]
        return bits.ctypes.data, bits.shape, strides, *kind, _DEVICES["cpu"], 0, not bits.flags.writeable

    def empty(self, x: Array, shape: Tuple[int, ...], floats: bool) -> Array:
        return np.empty(shape, np.float32 if floats else x.dtype)


class _Torch(_Library):
    """PyTorch. Its __dlpack__ costs more than a small scan. So before DLPack's table of functions (2.10) tensors are
    described by hand."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.unpack_dual: Any = torch.autograd.forward_ad.unpack_dual
        self.types = {getattr(torch, name): kind for name, kind in _TYPES.items()}
        self.is_described = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")

    def operand(self, x: Array) -> Any:
        if self.torch.is_grad_enabled() and (x.requires_grad or self.unpack_dual(x).tangent is not None):
            raise ValueError(
                "requires a gradient, which mmrec.ops does not record: use mmrec.torch, detach() or torch.no_grad()"
            )
        if x.is_neg():
            raise ValueError("found a tensor that is negated when it is read, expected resolve_neg() of it")
        if self.is_described:
            return x
        kind, device = self.types.get(x.dtype), x.device
        if kind is None or device.type not in _DEVICES:
            raise TypeError(
                f"found a tensor of {x.dtype} on {device}, expected float32, float16 or bfloat16 on cpu or cuda"
            )
        return x.data_ptr(), x.shape, x.stride(), *kind, _DEVICES[device.type], device.index or 0, False

    def written(self, x: Array) -> Any:
        operand = self.operand(x)
        if not x.is_inference():
            self.torch.autograd.graph.increment_version(x)  # for a graph that has saved it
        return operand

    def empty(self, x: Array, shape: Tuple[int, ...], floats: bool) -> Array:
        if not floats and type(x) is self.torch.Tensor:  # four times as fast as empty()
            return self.torch.empty_like(x, layout=self.torch.strided, memory_format=self.torch.contiguous_format)
        return self.torch.empty(shape, dtype=self.torch.float32 if floats else x.dtype, device=x.device)

    def stream(self, x: Array) -> int:
        return int(self.torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0


class _CuPy(_Library):
    """CuPy, whose arrays do not tell their namespace and are made on the current device."""

    def empty(self, x: Array, shape: Tuple[int, ...], floats: bool) -> Array:
        with x.device:
            return sys.modules["cupy"].empty(shape, np.float32 if floats else x.dtype)

    def stream(self, x: Array) -> int:
        with x.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=256)
def _row_major(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """Strides, in elements, of an array whose last axis moves fastest."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


class _Jax(_Library):
    """JAX. Its empty() takes twenty times as long as a compiled function that makes the array, and its __dlpack__ costs
    more than a small scan."""

    def __init__(self) -> None:
        import jax

        self.types = {jax.numpy.dtype(name): kind for name, kind in _TYPES.items()}
        self.tracer = jax.core.Tracer

        @functools.lru_cache(maxsize=256)
        def device_of(sharding: Any) -> Tuple[int, int]:
            """As DLPack numbers devices: its type, and which one."""
            if len(sharding.device_set) != 1:
                raise ValueError(f"found an array on {len(sharding.device_set)} devices, expected one device")
            there: Any = jax.numpy.empty(0, device=next(iter(sharding.device_set)))
            kind, number = there.__dlpack_device__()
            return int(kind), int(number)

        @functools.lru_cache(maxsize=256)
        def maker(shape: Tuple[int, ...], dtype: Any, sharding: Any) -> Any:
            return jax.jit(lambda: jax.numpy.empty(shape, dtype), out_shardings=sharding)

        self.device_of, self.maker = device_of, maker

    def operand(self, x: Array) -> Any:
        if isinstance(x, self.tracer):
            raise TypeError("found a tracer, expected an array: mmrec.ops cannot be called within jax.jit and the like")
        device = self.device_of(x.sharding)
        x.block_until_ready()  # its computation must have ended
        kind = self.types.get(x.dtype)
        layout = getattr(getattr(x, "format", None), "layout", None)  # JAX before 0.7 has none
        shape = x.shape
        if kind is None or layout is None or layout.major_to_minor != tuple(range(len(shape))):
            return x
        return x.unsafe_buffer_pointer(), shape, _row_major(shape), *kind, *device, False

    def written(self, x: Array) -> Any:
        raise ValueError("is read-only, as all arrays of JAX are")

    def empty(self, x: Array, shape: Tuple[int, ...], floats: bool) -> Array:
        return self.maker(shape, np.dtype(np.float32) if floats else x.dtype, x.sharding)()

    def finish(self, x: Array) -> None:
        """JAX cannot know that its array is being written."""
        device_type, device = self.device_of(x.sharding)
        if device_type == _DEVICES["cuda"]:
            _mmrec.synchronize(device, 0)


_libraries: Dict[type, _Library] = {}  # by the type of arrays


@functools.lru_cache(maxsize=None)
def _made(library: type) -> _Library:
    made: _Library = library()
    return made


def _library(x: Array) -> Optional[_Library]:
    """The library of the array `x`; None if it cannot make arrays."""
    kind = type(x)
    if (known := _libraries.get(kind)) is not None:
        return known
    torch = sys.modules.get("torch")
    if isinstance(x, np.ndarray):
        library: Any = _Numpy
    elif torch is not None and isinstance(x, torch.Tensor):
        library = _Torch
    elif kind.__module__.startswith("jax"):
        library = _Jax
    elif kind.__module__.startswith("cupy"):
        library = _CuPy
    elif hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__"):
        library = _Library
    else:
        return None
    return _libraries.setdefault(kind, _made(library))


def _operand(x: Array, name: str, is_written: bool = False) -> Any:
    """What the extension takes for the array `x`. It reads arrays of unknown libraries by DLPack."""
    library = _library(x)
    if library is None:
        if isinstance(x, tuple):
            raise TypeError(f"{name}: found tuple, expected an array that speaks DLPack")
        return x
    try:
        return library.written(x) if is_written else library.operand(x)
    except (TypeError, ValueError) as fault:
        raise type(fault)(f"{name}: {fault}") from None


def _begin(x: Array, name: str, out: Optional[Array], row_floats: bool = False) -> Tuple[_Library, Any, Array, Any]:
    """The library of the first argument `x`, its operand, and `out` with its operand. If `out` is None it is made: like
    `x`, or a float32 for each row."""
    library = _library(x)
    if library is None:
        raise TypeError(f"{name}: found {type(x).__name__}, expected an array that speaks DLPack")
    first = _operand(x, name)
    if out is not None:
        return library, first, out, _operand(out, "out", True)
    out = library.empty(x, tuple(x.shape)[:-1] if row_floats else x.shape, row_floats)
    return library, first, out, library.operand(out)


def _scan(
    kind: int,
    x: Array,
    b: Optional[Array],
    carry: Optional[Array],
    out: Optional[Array],
    log_out: Optional[Array],
    return_carry: bool,
    reverse: bool,
    stream: Optional[int],
    threads: int,
) -> Any:
    library, first, out, target = _begin(x, ("gamma", "x", "log_a")[kind], out)
    last = library.empty(x, (*x.shape[:-2], *x.shape[-1:]), True) if return_carry else None
    _mmrec.scan(
        kind,
        first,
        None if b is None else _operand(b, "b"),
        target,
        None if log_out is None else _operand(log_out, "log_out", True),
        None if carry is None else _operand(carry, "carry"),
        None if last is None else library.operand(last),
        reverse,
        library.stream(x) if stream is None else stream,
        threads,
    )
    library.finish(out)
    return out if last is None else (out, last)


def decay_scan(
    log_a: Array,
    b: Array,
    *,
    carry: Optional[Array] = None,
    out: Optional[Array] = None,
    return_carry: bool = False,
    reverse: bool = False,
    stream: Optional[int] = None,
    threads: int = 0,
) -> Any:
    """The decayed recurrence h_t = exp(log_a_t) h_{t-1} + b_t, of log-decays `log_a` and values `b` [..., time, dim].

    log_a may have either sign and may be -inf (forget all). The carry is h, 0 where none is given. `out` receives h and
    may be `b`. Returns h, with return_carry h and the last state, float32 [..., dim].
    """
    return _scan(_DECAY, log_a, b, carry, out, None, return_carry, reverse, stream, threads)


def exp_product_scan(
    gamma: Array,
    *,
    carry: Optional[Array] = None,
    out: Optional[Array] = None,
    log_out: Optional[Array] = None,
    return_carry: bool = False,
    reverse: bool = False,
    stream: Optional[int] = None,
    threads: int = 0,
) -> Any:
    """The running product of decay gates `gamma` [..., time, dim]: y_t = exp(L_t), L_t = sum of clamp(log(gamma_i +
    1e-8), -50, 0) over i <= t.

    The carry is L, 0 where none is given. `out` receives y and may be `gamma`; `log_out`, float32 [..., time, dim],
    receives L. Returns y, with return_carry y and the last L, float32 [..., dim].
    """
    return _scan(_EXP_PRODUCT, gamma, None, carry, out, log_out, return_carry, reverse, stream, threads)


def logsumexp_scan(
    x: Array,
    *,
    carry: Optional[Array] = None,
    out: Optional[Array] = None,
    return_carry: bool = False,
    reverse: bool = False,
    stream: Optional[int] = None,
    threads: int = 0,
) -> Any:
    """The running log-sum-exp y_t = log of the sum of exp(x_i) over i <= t, of `x` [..., time, dim].

    The carry is y, -inf where none is given. `out` receives y and may be `x`. Returns y, with return_carry y and the
    last y, float32 [..., dim].
    """
    return _scan(_LOGSUMEXP, x, None, carry, out, None, return_carry, reverse, stream, threads)


def token_logprobs(
    logits: Array,
    targets: Array,
    *,
    out: Optional[Array] = None,
    check_targets: bool = True,
    stream: Optional[int] = None,
    threads: int = 0,
) -> Array:
    """log p = logits[target] - logsumexp(logits) of each row, in one pass: `logits` [..., vocab], `targets` [...] of
    int32 or int64.

    Returns log-probs [...] of float32, in `out` where it is given. A row of -inf alone or with a NaN gives NaN. A
    target outside [0, vocab) is ValueError naming row and value, and nothing is written; on a GPU that check waits for
    the stream, and without check_targets such a row gives NaN there.
    """
    library, first, out, target = _begin(logits, "logits", out, row_floats=True)
    stream = library.stream(logits) if stream is None else stream
    _mmrec.token_logprobs(first, _operand(targets, "targets"), target, check_targets, stream, threads)
    library.finish(out)
    return out


def token_logprobs_backward(
    grad: Array,
    logits: Array,
    targets: Array,
    *,
    out: Optional[Array] = None,
    stream: Optional[int] = None,
    threads: int = 0,
) -> Array:
    """The derivative of token_logprobs by its logits: grad * (onehot(target) - softmax(logits)), [..., vocab] of the
    logits' type, of `grad` [...], float32.

    `out` receives it and may be `logits`. Targets must be in range.
    """
    library, first, out, target = _begin(logits, "logits", out)
    stream = library.stream(logits) if stream is None else stream
    derivative = _mmrec.token_logprobs_backward
    derivative(_operand(grad, "grad"), first, _operand(targets, "targets"), target, stream, threads)
    library.finish(out)
    return out
