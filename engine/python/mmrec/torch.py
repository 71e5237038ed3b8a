"""The kernels as PyTorch operators, with gradients: torch.compile and torch.library.opcheck know them as torch.ops.mmrec.*.

    from mmrec.torch import decay_scan, token_logprobs
    h = decay_scan(log_a, b)                 # [..., time, dim]
    loss = -token_logprobs(logits, targets).mean()

Tensors are on the CPU or on a GPU, where work is enqueued on the current stream; float32, float16 and bfloat16. Shapes,
types and errors are those of mmrec.ops. Gradients of the scans are scans themselves, run from the last step to the first:
of h_t = a_t h_{t-1} + b_t the adjoint is lambda_t = g_t + a_{t+1} lambda_{t+1}, with db = lambda and
d log_a_t = lambda_t a_t h_{t-1}.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from . import ops

__all__ = ["decay_scan", "exp_product_scan", "logsumexp_scan", "token_logprobs"]

_library = torch.library.Library("mmrec", "DEF")
for _schema in (
    "decay_scan(Tensor log_a, Tensor b, Tensor? carry, bool reverse) -> (Tensor, Tensor)",
    "decay_scan_backward(Tensor grad, Tensor grad_last, Tensor log_a, Tensor h, Tensor? carry, bool reverse)"
    " -> (Tensor, Tensor, Tensor)",
    "exp_product_scan(Tensor gamma, Tensor? carry, bool reverse) -> (Tensor, Tensor)",
    "exp_product_scan_backward(Tensor grad, Tensor grad_last, Tensor gamma, Tensor y, bool reverse) -> (Tensor, Tensor)",
    "logsumexp_scan(Tensor x, Tensor? carry, bool reverse) -> (Tensor, Tensor)",
    "logsumexp_scan_backward(Tensor grad, Tensor grad_last, Tensor x, Tensor y, Tensor? carry, bool reverse)"
    " -> (Tensor, Tensor)",
    "token_logprobs(Tensor logits, Tensor targets) -> Tensor",
    "token_logprobs_backward(Tensor grad, Tensor logits, Tensor targets) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _channels_last(x: Tensor) -> Tensor:
    """x with its last axis side by side: as it is, where it is."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _floats(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else x.float().contiguous()


def _carry_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-2] + x.shape[-1:], dtype=torch.float32)


def _fresh(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# ---------------------------------------------------------------------------------------------------------------------
# What runs
# ---------------------------------------------------------------------------------------------------------------------


def _decay_scan(log_a: Tensor, b: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.decay_scan(
        _channels_last(log_a), _channels_last(b), carry=_floats(carry), return_carry=True, reverse=reverse
    )


def _adjoint(log_a: Tensor, grad: Tensor, grad_last: Tensor, reverse: bool) -> Tensor:
    """lambda of the recurrence with log-decays `log_a`, of the type of `grad`: the last step's is a sum, the others' a scan of
    one step less against the direction, with the decays of the step after."""
    time = grad.shape[-2]
    adjoint = _fresh(grad)
    if time == 0:
        return adjoint
    end = 0 if reverse else time - 1
    state = grad.select(-2, end).float() + grad_last
    adjoint.select(-2, end).copy_(state)
    if time > 1:
        before, after = slice(0, time - 1), slice(1, time)
        if reverse:
            before, after = after, before
        ops.decay_scan(
            _channels_last(log_a[..., after, :]),
            _channels_last(grad[..., before, :]),
            carry=state.contiguous(),
            out=adjoint[..., before, :],
            reverse=not reverse,
        )
    return adjoint


def _decay_scan_backward(
    grad: Tensor, grad_last: Tensor, log_a: Tensor, h: Tensor, carry: Optional[Tensor], reverse: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    time = log_a.shape[-2]
    adjoint = _adjoint(log_a, grad, grad_last, reverse)
    if time == 0:
        return _fresh(log_a), adjoint, grad_last.clone()
    # What a step's state owes to the one before: lambda_t a_t, to be multiplied by h_{t-1}.
    d_log_a = torch.exp(log_a).mul_(adjoint).contiguous()
    begin = time - 1 if reverse else 0
    d_carry = torch.exp(log_a.select(-2, begin).float()) * adjoint.select(-2, begin).float()
    if time > 1:
        before, after = slice(0, time - 1), slice(1, time)
        if reverse:
            before, after = after, before
        d_log_a[..., after, :].mul_(h[..., before, :])
    first = d_log_a.select(-2, begin)
    if carry is None:
        first.zero_()
    else:
        first.copy_(d_carry * carry.float())
    return d_log_a, adjoint, d_carry


def _exp_product_scan(gamma: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.exp_product_scan(_channels_last(gamma), carry=_floats(carry), return_carry=True, reverse=reverse)


def _exp_product_scan_backward(
    grad: Tensor, grad_last: Tensor, gamma: Tensor, y: Tensor, reverse: bool
) -> Tuple[Tensor, Tensor]:
    # y = exp(L), and L is a sum: its gradient is the sum of all later ones, a recurrence without decay.
    along = _adjoint(torch.zeros_like(y), grad * y, grad_last, reverse).float()
    time = gamma.shape[-2]
    d_carry = along.select(-2, time - 1 if reverse else 0) if time > 0 else grad_last.clone()
    shifted = gamma.float() + 1e-8
    inside = (shifted <= 1.0) & (shifted >= 1.9287498479639178e-22)  # exp(-50)
    return (along / shifted * inside).to(gamma.dtype), d_carry.contiguous()


def _logsumexp_scan(x: Tensor, carry: Optional[Tensor], reverse: bool) -> Tuple[Tensor, Tensor]:
    return ops.logsumexp_scan(_channels_last(x), carry=_floats(carry), return_carry=True, reverse=reverse)


def _logsumexp_scan_backward(
    grad: Tensor, grad_last: Tensor, x: Tensor, y: Tensor, carry: Optional[Tensor], reverse: bool
) -> Tuple[Tensor, Tensor]:
    time = x.shape[-2]
    if time == 0:
        return _fresh(x), grad_last.clone()
    # dx_i = sum of g_t exp(x_i - y_t) over t >= i = exp(x_i - y_i) s_i with s_i = g_i + exp(y_i - y_{i+1}) s_{i+1}: y grows,
    # so no factor is above 1. Where y is -inf nothing has come yet, and no gradient goes there.
    values = y.float()
    previous = torch.full_like(values, -torch.inf)
    before, after = slice(0, time - 1), slice(1, time)
    if reverse:
        before, after = after, before
    begin = time - 1 if reverse else 0
    previous[..., after, :] = values[..., before, :]
    if carry is not None:
        previous.select(-2, begin).copy_(carry)
    there = values > -torch.inf
    decays = torch.where(there, previous - values, torch.zeros_like(values))
    s = _adjoint(decays, grad.float(), grad_last, reverse)
    d_x = torch.where(there, torch.exp(x.float() - values) * s, torch.zeros_like(values)).to(x.dtype)
    first = s.select(-2, begin) * torch.exp(decays.select(-2, begin))
    return d_x, (torch.zeros_like(first) if carry is None else first).contiguous()


def _token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    # PyTorch's own losses do not wait for the GPU to look at targets, either.
    return ops.token_logprobs(_channels_last(logits), targets.contiguous(), check_targets=not logits.is_cuda)


def _token_logprobs_backward(grad: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    return ops.token_logprobs_backward(grad.float().contiguous(), _channels_last(logits), targets.contiguous())


# ---------------------------------------------------------------------------------------------------------------------
# What PyTorch is told: shapes, and gradients
# ---------------------------------------------------------------------------------------------------------------------


def _register(name: str, run: Any, fake: Any) -> None:
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"mmrec::{name}", fake, lib=_library)


_register("decay_scan", _decay_scan, lambda log_a, b, carry, reverse: (_fresh(b), _carry_of(b)))
_register(
    "decay_scan_backward",
    _decay_scan_backward,
    lambda grad, grad_last, log_a, h, carry, reverse: (_fresh(log_a), _fresh(grad), _carry_of(log_a)),
)
_register("exp_product_scan", _exp_product_scan, lambda gamma, carry, reverse: (_fresh(gamma), _carry_of(gamma)))
_register(
    "exp_product_scan_backward",
    _exp_product_scan_backward,
    lambda grad, grad_last, gamma, y, reverse: (_fresh(gamma), _carry_of(gamma)),
)
_register("logsumexp_scan", _logsumexp_scan, lambda x, carry, reverse: (_fresh(x), _carry_of(x)))
_register(
    "logsumexp_scan_backward",
    _logsumexp_scan_backward,
    lambda grad, grad_last, x, y, carry, reverse: (_fresh(x), _carry_of(x)),
)
_register(
    "token_logprobs", _token_logprobs, lambda logits, targets: logits.new_empty(logits.shape[:-1], dtype=torch.float32)
)
_register("token_logprobs_backward", _token_logprobs_backward, lambda grad, logits, targets: _fresh(logits))


def _decay_setup(ctx: Any, inputs: Any, output: Any) -> None:
    log_a, _, carry, ctx.reverse = inputs
    ctx.save_for_backward(log_a, output[0], carry)


def _decay_gradient(ctx: Any, grad: Tensor, grad_last: Tensor) -> Any:
    log_a, h, carry = ctx.saved_tensors
    d_log_a, d_b, d_carry = torch.ops.mmrec.decay_scan_backward(grad, grad_last, log_a, h, carry, ctx.reverse)
    return d_log_a, d_b, None if carry is None else d_carry.to(carry.dtype), None


def _exp_product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    gamma, carry, ctx.reverse = inputs
    ctx.carry_type = None if carry is None else carry.dtype
    ctx.save_for_backward(gamma, output[0])


def _exp_product_gradient(ctx: Any, grad: Tensor, grad_last: Tensor) -> Any:
    gamma, y = ctx.saved_tensors
    d_gamma, d_carry = torch.ops.mmrec.exp_product_scan_backward(grad, grad_last, gamma, y, ctx.reverse)
    return d_gamma, None if ctx.carry_type is None else d_carry.to(ctx.carry_type), None


def _logsumexp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, carry, ctx.reverse = inputs
    ctx.save_for_backward(x, output[0], carry)


def _logsumexp_gradient(ctx: Any, grad: Tensor, grad_last: Tensor) -> Any:
    x, y, carry = ctx.saved_tensors
    d_x, d_carry = torch.ops.mmrec.logsumexp_scan_backward(grad, grad_last, x, y, carry, ctx.reverse)
    return d_x, None if carry is None else d_carry.to(carry.dtype), None


def _logprobs_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _logprobs_gradient(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.mmrec.token_logprobs_backward(grad, *ctx.saved_tensors), None


for _name, _gradient, _setup in (
    ("decay_scan", _decay_gradient, _decay_setup),
    ("exp_product_scan", _exp_product_gradient, _exp_product_setup),
    ("logsumexp_scan", _logsumexp_gradient, _logsumexp_setup),
    ("token_logprobs", _logprobs_gradient, _logprobs_setup),
):
    torch.library.register_autograd(f"mmrec::{_name}", _gradient, setup_context=_setup, lib=_library)


# ---------------------------------------------------------------------------------------------------------------------
# What is called
# ---------------------------------------------------------------------------------------------------------------------

Scanned = Union[Tensor, Tuple[Tensor, Tensor]]


def decay_scan(
    log_a: Tensor, b: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.decay_scan with gradients by log_a, b and carry; h, with return_carry h and the last state in float32."""
    h, last = torch.ops.mmrec.decay_scan(log_a, b, carry, reverse)
    return (h, last) if return_carry else h


def exp_product_scan(
    gamma: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.exp_product_scan with gradients by gamma, which are 0 where the logarithm is clamped, and carry."""
    y, last = torch.ops.mmrec.exp_product_scan(gamma, carry, reverse)
    return (y, last) if return_carry else y


def logsumexp_scan(
    x: Tensor, carry: Optional[Tensor] = None, *, reverse: bool = False, return_carry: bool = False
) -> Scanned:
    """mmrec.ops.logsumexp_scan with gradients by x and carry."""
    y, last = torch.ops.mmrec.logsumexp_scan(x, carry, reverse)
    return (y, last) if return_carry else y


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """mmrec.ops.token_logprobs with the gradient by the logits. On a GPU a target out of range gives NaN and nobody waits."""
    return torch.ops.mmrec.token_logprobs(logits, targets)
