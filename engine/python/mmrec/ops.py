"""The kernels by themselves, on arrays of any library that speaks DLPack: NumPy, PyTorch, JAX, CuPy.

Nothing is copied. Results are arrays of the library that the first argument came from, on its device. On a GPU the work
is enqueued on that library's current stream (`stream=` names another one) and the call returns; JAX shows no streams, so
with its arrays a call waits. Operands may have any strides as long as channels, the last axis, lie side by side.
`out` must be writable and share no memory with inputs, except that it may be exactly the one that a function names.

Types are float32, float16 and bfloat16; arithmetic is float32 or wider. Scans take [..., time, dim] of two to four
dimensions, and each channel is a sequence by itself. `carry` is the state before the first step, float32 [..., dim]; a run
cut into calls that hand the carry on gives what one call gives, within rounding. `reverse=True` runs from the last step to
the first. `threads` are the CPU's, 0 for all that the process may use.

Errors: TypeError for what is no array or of another type, ValueError naming argument, found and expected, mmrec.CudaError,
mmrec.DeviceUnavailable, MemoryError. Nothing is written before an error but a CUDA one. docs/python.md has examples.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional, Tuple

import numpy as np

from . import _mmrec

__all__ = ["decay_scan", "exp_product_scan", "logsumexp_scan", "token_logprobs", "token_logprobs_backward"]

# An array, or what scan() of the extension takes for one: (address, shape, strides, type's code, bits, device type,
# device, whether it is read-only), codes and device types as DLPack numbers them.
Array = Any

_EXP_PRODUCT, _LOGSUMEXP, _DECAY = range(3)
_CPU, _CUDA = 1, 2
_FLOAT32 = np.dtype(np.float32)


class _Numpy:
    """How arrays of NumPy are described, made, and on which stream."""

    @staticmethod
    def operand(x: Array) -> Any:
        if type(x) is np.ndarray and x.dtype.isbuiltin == 1:  # of this machine's byte order
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("found a masked array, of which kernels would see the masked entries, expected a plain one")
        if not x.dtype.isnative:
            raise TypeError(f"found {x.dtype.str} of the other byte order, expected this machine's")
        if x.dtype.kind != "V" or x.dtype.name != "bfloat16":
            return x
        bits = x.view(np.uint16)  # bfloat16 of ml_dtypes, which NumPy itself cannot describe
        return bits.ctypes.data, bits.shape, [s // 2 for s in bits.strides], 4, 16, _CPU, 0, not bits.flags.writeable

    @staticmethod
    def empty_like(x: Array) -> Array:
        return np.empty(x.shape, x.dtype)

    @staticmethod
    def empty_floats(x: Array, shape: Tuple[int, ...]) -> Array:
        return np.empty(shape, _FLOAT32)

    @staticmethod
    def stream(x: Array) -> int:
        return 0

    finish = None


class _Torch:
    """PyTorch: its __dlpack__ costs more than a small scan, so before DLPack's table of functions (2.10) tensors are described
    by hand."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.unpack_dual: Any = torch.autograd.forward_ad.unpack_dual
        self.types = {
            torch.float32: (2, 32),
            torch.float16: (2, 16),
            torch.bfloat16: (4, 16),
            torch.int32: (0, 32),
            torch.int64: (0, 64),
        }
        self.devices = {"cpu": _CPU, "cuda": _CUDA}
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
        kind = self.types.get(x.dtype)
        device = x.device
        if kind is None or device.type not in self.devices:
            raise TypeError(
                f"found a tensor of {x.dtype} on {device}, expected float32, float16 or bfloat16 on cpu or cuda"
            )
        return x.data_ptr(), x.shape, x.stride(), kind[0], kind[1], self.devices[device.type], device.index or 0, False

    def empty_like(self, x: Array) -> Array:
        return self.torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def empty_floats(self, x: Array, shape: Tuple[int, ...]) -> Array:
        return self.torch.empty(shape, dtype=self.torch.float32, device=x.device)

    def stream(self, x: Array) -> int:
        return int(self.torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0

    finish = None


class _Standard:
    """Any other library, by the array API standard: x.__array_namespace__() makes arrays, x.__dlpack__() describes them."""

    @staticmethod
    def operand(x: Array) -> Any:
        return x

    def empty_like(self, x: Array) -> Array:
        return x.__array_namespace__().empty(x.shape, dtype=x.dtype, device=x.device)

    def empty_floats(self, x: Array, shape: Tuple[int, ...]) -> Array:
        space = x.__array_namespace__()
        return space.empty(shape, dtype=space.float32, device=x.device)

    @staticmethod
    def stream(x: Array) -> int:
        return 0

    finish = None


class _CuPy(_Standard):
    """CuPy, whose arrays do not tell their namespace and are made on the current device."""

    def empty_like(self, x: Array) -> Array:
        return self._empty(x, x.shape, x.dtype)

    def empty_floats(self, x: Array, shape: Tuple[int, ...]) -> Array:
        return self._empty(x, shape, _FLOAT32)

    @staticmethod
    def _empty(x: Array, shape: Tuple[int, ...], dtype: Any) -> Array:
        with x.device:
            return sys.modules["cupy"].empty(shape, dtype)

    @staticmethod
    def stream(x: Array) -> int:
        with x.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=256)
def _row_major(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """Strides, in elements, of an array whose last axis moves fastest."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


class _Jax:
    """JAX, whose empty() takes twenty times as long as a compiled function that makes the array, and whose __dlpack__ costs more
    than a small scan."""

    def __init__(self) -> None:
        import jax

        names = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "int64": (0, 64)}
        self.types = {jax.numpy.dtype(name): kind for name, kind in names.items()}
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
        self.expect_array(x)
        device = self.device_of(x.sharding)
        x.block_until_ready()  # what is still being computed must be there
        kind = self.types.get(x.dtype)
        layout = getattr(getattr(x, "format", None), "layout", None)  # JAX before 0.7 has none
        shape = x.shape
        if kind is None or layout is None or layout.major_to_minor != tuple(range(len(shape))):
            return x
        return x.unsafe_buffer_pointer(), shape, _row_major(shape), *kind, *device, False

    def expect_array(self, x: Array) -> None:
        if isinstance(x, self.tracer):
            raise TypeError("found a tracer, expected an array: mmrec.ops cannot be called within jax.jit and the like")

    def empty_like(self, x: Array) -> Array:
        self.expect_array(x)
        return self.maker(x.shape, x.dtype, x.sharding)()

    def empty_floats(self, x: Array, shape: Tuple[int, ...]) -> Array:
        self.expect_array(x)
        return self.maker(shape, _FLOAT32, x.sharding)()

    @staticmethod
    def stream(x: Array) -> int:
        return 0

    def finish(self, x: Array) -> None:
        """JAX cannot know that its array is being written."""
        device_type, device = self.device_of(x.sharding)
        if device_type == _CUDA:
            _mmrec.synchronize(device, 0)


_numpy = _Numpy()
_standard = _Standard()
_cupy = _CuPy()
_torch: Optional[_Torch] = None
_jax: Optional[_Jax] = None


def _library(x: Array) -> Any:
    """The library that `x` is of; None where it is none that can make arrays."""
    if isinstance(x, np.ndarray):
        return _numpy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        global _torch
        if _torch is None:
            _torch = _Torch()
        return _torch
    if type(x).__module__.startswith("jax"):
        global _jax
        if _jax is None:
            _jax = _Jax()
        return _jax
    if type(x).__module__.startswith("cupy"):
        return _cupy
    return _standard if hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__") else None


def _first(x: Array, name: str) -> Any:
    """The library of the first argument, which makes the results."""
    library = _library(x)
    if library is None:
        raise TypeError(f"{name}: found {type(x).__name__}, expected an array that speaks DLPack")
    return library


def _operand(x: Array, name: str) -> Any:
    """What the extension takes for the array `x`, which it looks at itself where the library is not known."""
    library = _library(x)
    if library is None and isinstance(x, tuple):
        raise TypeError(f"{name}: found tuple, expected an array that speaks DLPack")
    try:
        return x if library is None else library.operand(x)
    except (TypeError, ValueError) as fault:
        raise type(fault)(f"{name}: {fault}") from None


def _written(x: Array, name: str) -> Any:
    """The same of an array of the caller's that is written to."""
    library = _library(x)
    if library is not None and library is _jax:
        raise ValueError(f"{name}: is read-only, as all arrays of JAX are")
    operand = _operand(x, name)
    if _torch is not None and library is _torch and not x.is_inference():
        _torch.torch.autograd.graph.increment_version(x)  # for a graph that has saved it
    return operand


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
    x_name = ("gamma", "x", "log_a")[kind]
    library = _first(x, x_name)
    first = _operand(x, x_name)
    target = None if out is None else _written(out, "out")
    if out is None:
        out = library.empty_like(x)
        target = library.operand(out)
    last = None
    if return_carry:
        shape = tuple(x.shape)
        last = library.empty_floats(x, shape[:-2] + shape[-1:])
    _mmrec.scan(
        kind,
        first,
        None if b is None else _operand(b, "b"),
        target,
        None if log_out is None else _written(log_out, "log_out"),
        None if carry is None else _operand(carry, "carry"),
        None if last is None else library.operand(last),
        reverse,
        library.stream(x) if stream is None else stream,
        threads,
    )
    if library.finish is not None:
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

    log_a may have either sign and may be -inf (forget all). The carry is h, 0 where none is given. `out` receives h and may
    be `b`. Returns h, with return_carry h and the last state, float32 [..., dim].
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
    """The running product of decay gates `gamma` [..., time, dim]: y_t = exp(L_t), L_t = sum of clamp(log(gamma_i + 1e-8), -50, 0)
    over i <= t.

    The carry is L, 0 where none is given. `out` receives y and may be `gamma`; `log_out`, float32 [..., time, dim], receives
    L. Returns y, with return_carry y and the last L, float32 [..., dim].
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

    The carry is y, -inf where none is given. `out` receives y and may be `x`. Returns y, with return_carry y and the last y,
    float32 [..., dim].
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
    """log p = logits[target] - logsumexp(logits) of each row, in one pass: `logits` [..., vocab], `targets` [...] of int32 or
    int64.

    Returns log-probs [...] of float32, in `out` where it is given. A row of -inf alone or with a NaN gives NaN. A target outside
    [0, vocab) is ValueError naming row and value, and nothing is written; on a GPU that check waits for the stream, and
    without check_targets such a row gives NaN there.
    """
    library = _first(logits, "logits")
    first = _operand(logits, "logits")
    target = None if out is None else _written(out, "out")
    if out is None:
        out = library.empty_floats(logits, tuple(logits.shape)[:-1])
        target = library.operand(out)
    _mmrec.token_logprobs(
        first,
        _operand(targets, "targets"),
        target,
        check_targets,
        library.stream(logits) if stream is None else stream,
        threads,
    )
    if library.finish is not None:
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
    """The derivative of token_logprobs by its logits: grad * (onehot(target) - softmax(logits)), [..., vocab] of the logits'
    type, of `grad` [...], float32.

    `out` receives it and may be `logits`. Targets must be in range.
    """
    library = _first(logits, "logits")
    first = _operand(logits, "logits")
    target = None if out is None else _written(out, "out")
    if out is None:
        out = library.empty_like(logits)
        target = library.operand(out)
    _mmrec.token_logprobs_backward(
        _operand(grad, "grad"),
        first,
        _operand(targets, "targets"),
        target,
        library.stream(logits) if stream is None else stream,
        threads,
    )
    if library.finish is not None:
        library.finish(out)
    return out
