"""The kernels as PyTorch operators, with derivatives: torch.compile and torch.library.opcheck know them as
torch.ops.mmrec.*. Long, because each operator needs its schema, its fake and its derivative.

    from mmrec.torch import decay_scan, token_logprobs
    h = decay_scan(log_a, b)                 # [..., time, dim]
    loss = -token_logprobs(logits, targets).mean()

Tensors are on the CPU or on a GPU, where work is enqueued on the current stream; float32, float16 and bfloat16. Errors
are those of mmrec.ops. The gradient of a scan is a scan from the last step to the first: for h_t = a_t h_{t-1} + b_t
the adjoint is lambda_t = g_t + a_{t+1} lambda_{t+1}, with db = lambda and d log_a_t = lambda_t a_t h_{t-1}. One fused
operator computes the gradient. If the gradient itself must be differentiable (create_graph, forward mode, torch.func),
it is composed of the operators below instead, so derivatives of any order and of both modes exist. torch.func needs the
functions of this module: torch.ops.mmrec.* refuse its transforms.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterable, Iterator, Literal, Optional, Tuple, TypeVar, Union, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops

__all__ = ["decay_scan", "exp_product_scan", "logsumexp_scan", "token_logprobs"]

F = TypeVar("F", bound=Callable[..., Any])

_library = torch.library.Library("mmrec", "DEF")


def _readable(x: Tensor) -> Tensor:
    """x with channels side by side and steps apart: as it is, where it is."""
    return x if x.dim() < 2 or (x.stride(-1) == 1 and x.stride(-2) > 0) else x.contiguous()


def _floats(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else x.float().contiguous()


def _carry_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-2] + x.shape[-1:], dtype=torch.float32)


def _fresh(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _begin(x: Tensor, reverse: bool) -> int:
    """The place of the first step."""
    return x.shape[-2] - 1 if reverse else 0


def _neighbours(x: Tensor, reverse: bool) -> Tuple[slice, slice]:
    """The places of all steps but the last, and of the steps after each."""
    before, after = slice(0, x.shape[-2] - 1), slice(1, x.shape[-2])
    return (after, before) if reverse else (before, after)


# ---------------------------------------------------------------------------------------------------------------------
# The operators
# ---------------------------------------------------------------------------------------------------------------------


def _operator(inputs: str, fake: Any, outputs: str = "(Tensor, Tensor)") -> Callable[[F], F]:
    """Decorates what an operator runs. `fake` gives outputs of the right shapes and types."""

    def define(run: F) -> F:
        name = run.__name__[1:]
        _library.define(f"{name}({inputs}) -> {outputs}", tags=(torch.Tag.needs_fixed_stride_order,))
        _library.impl(name, run, "CPU")
        _library.impl(name, run, "CUDA")
        torch.library.register_fake(f"mmrec::{name}", fake, lib=_library)
        return run

    return define


@_operator("Tensor log_a, Tensor b, Tensor? carry, bool reverse", lambda log_a, b, *_: (_fresh(b), _carry_of(b)))
def _decay_scan(log_a: Tensor, b: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.decay_scan(_readable(log_a), _readable(b), carry=_floats(carry), return_carry=True, reverse=reverse)


def _pull_back_now(decays: Tensor, grad: Tensor, grad_last: Tensor, reverse: bool) -> Tuple[Tensor, Tensor]:
    """_pull_back() without derivatives, in less memory. lambda has the type of `grad`. For the last step it is a sum;
    for the others a scan of one step less against the direction, with the decays of the step after."""
    adjoint = _fresh(grad)
    if grad.shape[-2] == 0:
        return adjoint, grad_last.clone()
    begin, end = _begin(grad, reverse), _begin(grad, not reverse)
    state = grad.select(-2, end).float() + grad_last
    adjoint.select(-2, end).copy_(state)
    if grad.shape[-2] > 1:
        before, after = _neighbours(grad, reverse)
        ops.decay_scan(
            _readable(decays[..., after, :]),
            _readable(grad[..., before, :]),
            carry=state.contiguous(),
            out=adjoint[..., before, :],
            reverse=not reverse,
        )
    return adjoint, decays.select(-2, begin).float().exp() * adjoint.select(-2, begin).float()


@_operator(
    "Tensor grad, Tensor grad_last, Tensor log_a, Tensor h, Tensor? carry, bool reverse",
    lambda grad, grad_last, log_a, *_: (_fresh(log_a), _fresh(grad), _carry_of(log_a)),
    "(Tensor, Tensor, Tensor)",
)
def _decay_scan_backward(
    grad: Tensor, grad_last: Tensor, log_a: Tensor, h: Tensor, carry: Optional[Tensor], reverse: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    adjoint, d_carry = _pull_back_now(log_a, grad, grad_last, reverse)
    if log_a.shape[-2] == 0:
        return _fresh(log_a), adjoint, d_carry
    # The derivative by the state before: lambda_t a_t, to be multiplied by h_{t-1}.
    d_log_a = torch.exp(log_a, out=_fresh(log_a)).mul_(adjoint)  # autocast leaves exp(out=) alone
    before, after = _neighbours(log_a, reverse)
    d_log_a[..., after, :].mul_(h[..., before, :])
    first = d_log_a.select(-2, _begin(log_a, reverse))
    first.zero_() if carry is None else first.copy_(d_carry * carry.float())
    return d_log_a, adjoint, d_carry


@_operator("Tensor gamma, Tensor? carry, bool reverse", lambda gamma, *_: (_fresh(gamma), _carry_of(gamma)))
def _exp_product_scan(gamma: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.exp_product_scan(_readable(gamma), carry=_floats(carry), return_carry=True, reverse=reverse)


@_operator(
    "Tensor grad, Tensor grad_last, Tensor gamma, Tensor y, bool reverse",
    lambda grad, grad_last, gamma, *_: (_fresh(gamma), _carry_of(gamma)),
)
def _exp_product_scan_backward(
    grad: Tensor, grad_last: Tensor, gamma: Tensor, y: Tensor, reverse: bool
) -> Tuple[Tensor, Tensor]:
    kept = (gamma.float(), y, reverse)
    d_gamma, d_carry = _scan_vjp(_exp_product_linear, grad, grad_last, *kept, pull_back=_pull_back_now)
    return d_gamma.to(gamma.dtype), d_carry


@_operator("Tensor x, Tensor? carry, bool reverse", lambda x, *_: (_fresh(x), _carry_of(x)))
def _logsumexp_scan(x: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.logsumexp_scan(_readable(x), carry=_floats(carry), return_carry=True, reverse=reverse)


@_operator(
    "Tensor grad, Tensor grad_last, Tensor x, Tensor y, Tensor? carry, bool reverse",
    lambda grad, grad_last, x, *_: (_fresh(x), _carry_of(x)),
)
def _logsumexp_scan_backward(
    grad: Tensor, grad_last: Tensor, x: Tensor, y: Tensor, carry: Optional[Tensor], reverse: bool
) -> Tuple[Tensor, Tensor]:
    kept = (x.float(), y.float(), carry, reverse)
    d_x, d_carry = _scan_vjp(_logsumexp_linear, grad.float(), grad_last, *kept, pull_back=_pull_back_now)
    return d_x.to(x.dtype), d_carry


def _rows(logits: Tensor, targets: Tensor, ignore_index: int) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """Logits whose rows lie at even distances; targets, 0 for ignored ones; which targets are ignored, None if there
    are none."""
    if logits.dim() > 2:
        logits = logits.flatten(0, -2).view(logits.shape)
    ignored = targets == ignore_index
    if not ignored.is_cuda and not ignored.any():
        return _readable(logits), targets.contiguous(), None
    return _readable(logits), targets.masked_fill(ignored, 0).contiguous(), ignored


@_operator(
    "Tensor logits, Tensor targets, int ignore_index",
    lambda logits, *_: logits.new_empty(logits.shape[:-1], dtype=torch.float32),
    "Tensor",
)
def _token_logprobs(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits, targets, ignored = _rows(logits, targets, ignore_index)
    # Like PyTorch's own losses this does not wait for the GPU to check targets.
    logprobs = ops.token_logprobs(logits, targets, check_targets=not logits.is_cuda)
    return logprobs if ignored is None else logprobs.masked_fill_(ignored, 0.0)


@_operator(
    "Tensor grad, Tensor logits, Tensor targets, int ignore_index", lambda _, logits, *__: _fresh(logits), "Tensor"
)
def _token_logprobs_backward(grad: Tensor, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits, targets, ignored = _rows(logits, targets, ignore_index)
    grad = grad.float() if ignored is None else grad.float().masked_fill(ignored, 0.0)
    return ops.token_logprobs_backward(grad.contiguous(), logits, targets)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives: `vjp` from outputs to inputs, `jvp` from inputs to outputs. Composed of the operators and of PyTorch's
# own they have derivatives themselves. Their tensors are float32; fused operators call the same with a pull_back of
# their own.
# ---------------------------------------------------------------------------------------------------------------------


def _previous(x: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """For each step the entry of x one step earlier; `first` for the first step."""
    if x.shape[-2] == 0:
        return x
    first = first.unsqueeze(-2)
    return torch.cat((x[..., 1:, :], first), -2) if reverse else torch.cat((first, x[..., :-1, :]), -2)


def _previous_state(y: Tensor, carry: Optional[Tensor], identity: float, reverse: bool) -> Tensor:
    return _previous(y, y.new_full(y.shape[:-2] + y.shape[-1:], identity) if carry is None else carry, reverse)


def _pull_back(decays: Tensor, grad: Tensor, grad_last: Tensor, reverse: bool) -> Tuple[Tensor, Tensor]:
    """lambda of the recurrence with log-decays `decays`, and the gradient by its carry."""
    after = _previous(decays, torch.zeros_like(grad_last), not reverse)
    adjoint, begin = _apply("decay_scan", after, grad, grad_last, not reverse)
    if decays.shape[-2] > 0:
        begin = begin * decays.select(-2, _begin(decays, reverse)).exp()
    return adjoint, begin


# The derivative of a scan is a scan with decays. A linear form has its log-decays; for each input the map from a change
# of the input to the change of the same step's state; and the factor from a change of the state to that of the output
# (None: 1). Maps and factors are entry by entry, so gradients take the same ones in the other direction.
Linear = Tuple[Tensor, Tuple[Any, ...], Optional[Tensor]]


def _decay_linear(log_a: Tensor, h: Tensor, carry: Optional[Tensor], reverse: bool) -> Linear:
    slope = log_a.exp() * _previous_state(h, carry, 0.0, reverse)
    return log_a, (lambda d: d * slope, lambda d: d), None


def _exp_product_linear(gamma: Tensor, y: Tensor, reverse: bool) -> Linear:
    # y = exp(L), and L is a sum: a recurrence without decay. Where the logarithm is clamped, gamma changes nothing.
    shifted = gamma + 1e-8
    inside = (shifted <= 1.0) & (shifted >= 1.9287498479639178e-22)  # exp(-50)
    scale = torch.where(inside, shifted, torch.inf)
    return torch.zeros_like(y), (lambda d: d / scale,), y


def _logsumexp_linear(x: Tensor, y: Tensor, carry: Optional[Tensor], reverse: bool) -> Linear:
    # y grows, so neither derivative is above 1. Where y is -inf nothing has come yet, and no gradient goes there.
    there = y > -torch.inf
    previous = _previous_state(y, carry, -torch.inf, reverse)
    slope = torch.where(there, x - y, -torch.inf).exp()
    return torch.where(there, previous - y, 0.0), (lambda d: d * slope,), None


def _scan_vjp(linear: Any, grad: Tensor, grad_last: Tensor, *kept: Any, pull_back: Any = _pull_back) -> Any:
    decays, maps, factor = linear(*kept)
    adjoint, d_carry = pull_back(decays, grad if factor is None else grad * factor, grad_last, kept[-1])
    return (*(each(adjoint) for each in maps), d_carry)


def _scan_jvp(linear: Any, inputs: int, *arguments: Any) -> Any:
    """`inputs` says how many inputs the scan has besides the carry."""
    tangents, d_carry, kept = arguments[:inputs], arguments[inputs], arguments[inputs + 1 :]
    decays, maps, factor = linear(*kept)
    changes = [each(d) for each, d in zip(maps, tangents) if d is not None]
    change = sum(changes[1:], changes[0]) if changes else torch.zeros_like(decays)
    d_state, d_last = _apply("decay_scan", decays, change, d_carry, kept[-1])
    return d_state if factor is None else factor * d_state, d_last


def _hot(targets: Tensor, ignore_index: int) -> Tuple[Tensor, Tensor]:
    """Which targets are ignored, and columns [..., 1] of the targets: 0 for those."""
    ignored = targets == ignore_index
    return ignored, targets.masked_fill(ignored, 0).long().unsqueeze(-1)


def _logprobs_vjp(grad: Tensor, logits: Tensor, targets: Tensor, ignore_index: int) -> Any:
    ignored, hot = _hot(targets, ignore_index)
    grad = grad.masked_fill(ignored, 0.0).unsqueeze(-1)
    return (-grad * logits.softmax(-1)).scatter_add(-1, hot, grad)


def _logprobs_jvp(d_logits: Any, _: None, logits: Tensor, targets: Tensor, ignore_index: int) -> Any:
    ignored, hot = _hot(targets, ignore_index)
    mean = (d_logits * logits.softmax(-1)).sum(-1)
    return (d_logits.gather(-1, hot).squeeze(-1) - mean).masked_fill(ignored, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The operators with derivatives
# ---------------------------------------------------------------------------------------------------------------------


def _has_tangent(x: Optional[Tensor]) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


def _wide(tensors: Iterable[Any]) -> Iterator[Any]:
    """Those of floating point as float32."""
    return (x.float() if x is not None and x.is_floating_point() else x for x in tensors)


_functions: Dict[str, Any] = {}


def _apply(name: str, *args: Any) -> Any:
    """Calls an operator, which takes at most four axes, on tensors of any number of axes."""
    call = getattr(torch.ops.mmrec, name) if torch.compiler.is_compiling() else _functions[name]
    more = args[0].dim() - 4
    if more <= 0:
        return call(*args)
    lead = args[0].shape[: more + 1]
    for x in args:
        if isinstance(x, Tensor) and x.shape[: more + 1] != lead:
            raise ValueError(f"found shape {list(x.shape)}, expected it to begin with {list(lead)}")
    found = call(*(x.flatten(0, more) if isinstance(x, Tensor) else x for x in args))
    return tuple(y.unflatten(0, lead) for y in found) if isinstance(found, tuple) else found.unflatten(0, lead)


def _differentiable(name: str, keep: Any, vjp: Any, jvp: Any) -> None:
    """Gives the operator its derivatives. `keep` picks the inputs and outputs that they need; `vjp` and `jvp` take
    gradients or tangents, the kept tensors, and the operator's last argument."""
    op = getattr(torch.ops.mmrec, name).default
    fused = getattr(torch.ops.mmrec, name + "_backward").default

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.option = inputs
        ctx.types = [x.dtype if x is not None and x.is_floating_point() else None for x in tensors]
        ctx.type = output[0].dtype if isinstance(output, tuple) else output.dtype
        kept = keep(*tensors, output)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below(*args)
        setup_context(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = (*grads, *ctx.saved_tensors)
        is_plain = not torch.is_grad_enabled() and not any(map(_has_tangent, inputs))
        found = fused(*inputs, ctx.option) if is_plain else vjp(*_wide(inputs), ctx.option)
        if isinstance(found, Tensor):
            found = (found, None)  # targets have none
        return (*(None if t is None else g.to(t) for g, t in zip(found, ctx.types)), None)

    def forward_mode(ctx: Any, *tangents: Any) -> Any:
        found = jvp(*_wide((*tangents[:-1], *ctx.saved_tensors)), ctx.option)
        return (found[0].to(ctx.type), found[1]) if isinstance(found, tuple) else found

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        batched = [
            x if not isinstance(x, Tensor) else x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(args, in_dims)
        ]
        found = _apply(name, *batched)
        return found, (0, 0) if isinstance(found, tuple) else 0

    def function(**methods: Any) -> Any:
        methods = {"backward": backward, "jvp": forward_mode, **methods}
        return type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in methods.items()})

    # What torch.func needs costs more than a small scan.
    plain, transformed = function(forward=forward), function(forward=below, setup_context=setup_context, vmap=vmap)

    def call(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or any(map(_has_tangent, tensors)):
            return plain.apply(*args)
        return below(*args)

    def kernel(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(f"torch.ops.mmrec.{name} within torch.func or vmap: call mmrec.torch.{name}")
        return call(*args)

    _library.impl(name, kernel, "Autograd")
    _functions[name] = lambda *args: (transformed.apply if torch._C._are_functorch_transforms_active() else call)(*args)


for name, inputs, linear, keep in (
    ("decay_scan", 2, _decay_linear, lambda log_a, b, carry, y: (log_a, y[0], carry)),
    ("exp_product_scan", 1, _exp_product_linear, lambda x, carry, y: (x, y[0])),
    ("logsumexp_scan", 1, _logsumexp_linear, lambda x, carry, y: (x, y[0], carry)),
):
    _differentiable(name, keep, functools.partial(_scan_vjp, linear), functools.partial(_scan_jvp, linear, inputs))
_differentiable("token_logprobs", lambda logits, targets, y: (logits, targets), _logprobs_vjp, _logprobs_jvp)


# ---------------------------------------------------------------------------------------------------------------------
# The functions
# ---------------------------------------------------------------------------------------------------------------------

Scanned = Union[Tensor, Tuple[Tensor, Tensor]]


def _can_expand(shape: Any, other: Any) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(shape), reversed(other)))


def _scan(name: str, inputs: Tuple[Tensor, ...], carry: Optional[Tensor], reverse: bool, return_carry: bool) -> Scanned:
    x = inputs[0]
    if x.dim() < 2:
        raise ValueError(f"found {x.dim()} dimensions, expected [..., time, dim]")
    shape = x.shape[:-2] + x.shape[-1:]
    if carry is not None and carry.dim() <= len(shape) and carry.shape != shape and _can_expand(carry.shape, shape):
        carry = carry.expand(shape)
    y, last = _apply(name, *inputs, carry, reverse)
    return (y, last) if return_carry else y


@overload
def decay_scan(
    log_a: Tensor,
    b: Tensor,
    carry: Optional[Tensor] = None,
    *,
    reverse: bool = False,
    return_carry: Literal[False] = False,
) -> Tensor: ...
@overload
def decay_scan(
    log_a: Tensor, b: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: Literal[True]
) -> Tuple[Tensor, Tensor]: ...
def decay_scan(
    log_a: Tensor, b: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.decay_scan with derivatives by log_a, b and carry; h, with return_carry h and the last state in
    float32. Shapes are broadcast and types promoted as by log_a + b."""
    if log_a.shape != b.shape and _can_expand(log_a.shape, b.shape):
        log_a, b = torch.broadcast_tensors(log_a, b)
    if log_a.dtype != b.dtype:
        dtype = torch.promote_types(log_a.dtype, b.dtype)
        log_a, b = log_a.to(dtype), b.to(dtype)
    return _scan("decay_scan", (log_a, b), carry, reverse, return_carry)


@overload
def exp_product_scan(
    gamma: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: Literal[False] = False
) -> Tensor: ...
@overload
def exp_product_scan(
    gamma: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: Literal[True]
) -> Tuple[Tensor, Tensor]: ...
def exp_product_scan(
    gamma: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.exp_product_scan with derivatives by gamma, which are 0 where the logarithm is clamped, and carry."""
    return _scan("exp_product_scan", (gamma,), carry, reverse, return_carry)


@overload
def logsumexp_scan(
    x: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: Literal[False] = False
) -> Tensor: ...
@overload
def logsumexp_scan(
    x: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: Literal[True]
) -> Tuple[Tensor, Tensor]: ...
def logsumexp_scan(
    x: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.logsumexp_scan with derivatives by x and carry."""
    return _scan("logsumexp_scan", (x,), carry, reverse, return_carry)


def token_logprobs(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """mmrec.ops.token_logprobs with derivatives by the logits. Rows whose target is `ignore_index` give 0, as in
    cross_entropy(). On a GPU another target out of range gives NaN and nobody waits."""
    return _apply("token_logprobs", logits, targets, ignore_index)
