"""mmrec.ops: the kernels on arrays of NumPy, PyTorch and JAX, against their equations in float64."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from conftest import true_in_a_fork
from mmrec import ops


def exp_product(gamma, carry):
    logs = np.clip(np.log(gamma + 1e-8), -50.0, 0.0)
    logs[..., 0, :] += carry
    return np.exp(np.cumsum(logs, axis=-2)), np.sum(logs, axis=-2)


def logsumexp(x, carry):
    y = np.empty_like(x)
    state = carry
    for t in range(x.shape[-2]):
        y[..., t, :] = state = np.logaddexp(state, x[..., t, :])
    return y, state


def decay(log_a, b, carry):
    h = np.empty_like(b)
    state = carry
    for t in range(b.shape[-2]):
        h[..., t, :] = state = np.exp(log_a[..., t, :]) * state + b[..., t, :]
    return h, state


def logprobs(logits, targets):
    top = logits.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return np.take_along_axis(logits, targets[..., None], -1)[..., 0] - lse


SHAPES = [(1, 1), (7, 5), (2, 33, 16), (2, 3, 65, 8), (3, 1, 300)]


def numbers(shape, low, high, seed):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(np.float32, 2e-5), (np.float16, 1e-3)])
def test_scans_agree_with_their_equations(shape, reverse, dtype, tolerance):
    carry = numbers(shape[:-2] + shape[-1:], -1.0, 0.0, 1)
    turned = (lambda x: np.flip(x, -2)) if reverse else (lambda x: x)

    def check(function, reference, *inputs):
        inputs = [x.astype(dtype) for x in inputs]
        y, last = function(*inputs, carry=carry, return_carry=True, reverse=reverse)
        want, want_last = reference(*(turned(x).astype(np.float64) for x in inputs), carry.astype(np.float64))
        assert y.dtype == dtype and y.shape == shape and last.dtype == np.float32
        np.testing.assert_allclose(y, turned(want), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(last, want_last, rtol=2e-5, atol=2e-5)

    check(ops.exp_product_scan, exp_product, numbers(shape, 0.9, 1.0, 2))
    check(ops.logsumexp_scan, logsumexp, numbers(shape, -3.0, 3.0, 3))
    check(ops.decay_scan, decay, numbers(shape, -0.5, 0.05, 4), numbers(shape, -1.0, 1.0, 5))


def test_log_out_and_out_are_written_to():
    gamma = numbers((2, 20, 4), 0.8, 1.0, 6)
    out, log_out = np.empty_like(gamma), np.empty_like(gamma)
    assert ops.exp_product_scan(gamma, out=out, log_out=log_out) is out
    np.testing.assert_allclose(np.exp(log_out), out, rtol=1e-5)
    np.testing.assert_allclose(out, exp_product(gamma.astype(np.float64), 0.0)[0], rtol=2e-5)


def test_any_strides_serve_without_a_copy():
    # [batch, time, heads, dim], seen as [batch, heads, time, dim], and written to likewise.
    stored = numbers((2, 30, 3, 8), -0.5, 0.0, 7)
    log_a = stored.transpose(0, 2, 1, 3)
    b = numbers((2, 3, 90, 8), -1.0, 1.0, 8)[:, :, ::3]
    place = np.zeros((2, 30, 3, 16), np.float32)
    h = place.transpose(0, 2, 1, 3)[..., 4:12]
    assert ops.decay_scan(log_a, b, out=h) is h
    np.testing.assert_allclose(h, decay(log_a.astype(np.float64), b.astype(np.float64), 0.0)[0], rtol=2e-5, atol=2e-5)
    assert not place[..., :4].any() and not place[..., 12:].any()


def test_a_run_cut_in_two_hands_the_carry_on():
    log_a, b = numbers((4, 100, 6), -0.3, 0.0, 9), numbers((4, 100, 6), -1.0, 1.0, 10)
    whole = ops.decay_scan(log_a, b)
    first, carry = ops.decay_scan(log_a[:, :37], b[:, :37], return_carry=True)
    second = ops.decay_scan(log_a[:, 37:], b[:, 37:], carry=carry)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 1000)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_logprobs_and_their_derivative(shape, index):
    logits = numbers(shape, -8.0, 8.0, 11)
    targets = np.random.default_rng(12).integers(0, shape[-1], shape[:-1]).astype(index)
    grad = numbers(shape[:-1], -1.0, 1.0, 13)
    got = ops.token_logprobs(logits, targets)
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(got, logprobs(wide, targets), rtol=1e-5, atol=1e-5)
    soft = np.exp(wide - wide.max(-1, keepdims=True))
    soft /= soft.sum(-1, keepdims=True)
    hot = np.arange(shape[-1]) == targets[..., None]
    back = ops.token_logprobs_backward(grad, logits, targets)
    np.testing.assert_allclose(back, grad[..., None] * (hot - soft), rtol=1e-5, atol=1e-6)


def test_what_is_wrong_is_named():
    x, y = np.zeros((4, 8), np.float32), np.zeros((4, 9), np.float32)
    for error, message, call in [
        (TypeError, "found list, expected an array that speaks DLPack", lambda: ops.logsumexp_scan([[1.0]])),
        (
            TypeError,
            "found float64, expected float32, float16 or bfloat16",
            lambda: ops.logsumexp_scan(x.astype(float)),
        ),
        (TypeError, "b: found float16, expected the type of log_a", lambda: ops.decay_scan(x, x.astype(np.float16))),
        (ValueError, "x: found 1 dimensions", lambda: ops.logsumexp_scan(x[0])),
        (
            ValueError,
            "found 5 dimensions, expected at most 4",
            lambda: ops.logsumexp_scan(np.zeros((1,) * 5, np.float32)),
        ),
        (ValueError, r"b: found shape \[4, 9\], expected that of log_a, \[4, 8\]", lambda: ops.decay_scan(x, y)),
        (
            ValueError,
            r"carry: found shape \[4\], expected \[8\]",
            lambda: ops.logsumexp_scan(x, carry=np.zeros(4, np.float32)),
        ),
        (ValueError, "channels", lambda: ops.logsumexp_scan(np.zeros((8, 4), np.float32).T)),
        (ValueError, "target", lambda: ops.token_logprobs(x, np.array([0, 8, 0, 0]))),
        (
            ValueError,
            r"targets: found shape \[3\], expected that of the rows, \[4\]",
            lambda: ops.token_logprobs(x, np.zeros(3, int)),
        ),
        (
            TypeError,
            "targets: found uint64, expected int32 or int64",
            lambda: ops.token_logprobs(x, np.zeros(4, np.uint64)),
        ),
        (ValueError, "out", lambda: ops.token_logprobs(x, np.zeros(4, int), out=np.zeros(5, np.float32))),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_read_only_memory_is_not_written_to(tmp_path):
    x = numbers((3, 4), -1.0, 0.0, 1)
    locked = np.zeros_like(x)
    locked.flags.writeable = False
    np.zeros_like(x).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=x.shape)
    view = memoryview(bytes(x.nbytes)).cast("B").cast("f", x.shape)
    targets, rows = np.zeros(3, int), np.zeros(3, np.float32)
    rows.flags.writeable = False
    calls = [
        ("log_out", lambda: ops.exp_product_scan(x, log_out=locked)),
        ("out", lambda: ops.token_logprobs(x, targets, out=rows)),
        ("out", lambda: ops.token_logprobs_backward(rows, x, targets, out=locked)),
    ]
    calls += [
        ("out", lambda out=out: ops.logsumexp_scan(x, out=out)) for out in (locked, mapped, view, bytes(x.nbytes))
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^{name}: is read-only"):
            call()
    assert not locked.any() and not rows.any()
    locked_x = x.copy()
    locked_x.flags.writeable = False
    assert np.array_equal(ops.logsumexp_scan(locked_x), ops.logsumexp_scan(x))  # reading it is fine


def test_what_is_written_shares_no_memory_with_what_is_read():
    store = numbers((2, 40, 16), -0.5, 0.0, 1)
    a, b = store[..., :8].copy(), store[..., 8:].copy()
    targets, logits = np.zeros(40, np.int32), store[0]
    flat = store.reshape(-1)
    for message, call in [
        ("out: shares memory with b", lambda s: ops.decay_scan(a[:, 1:], s[:, 1:, :8], out=s[:, :-1, :8])),
        ("out: shares memory with b", lambda s: ops.decay_scan(a, s[..., :8], out=s[..., 4:12])),
        ("out: shares memory with b", lambda s: ops.decay_scan(a, s[:, :, :8], out=s[:, ::-1, :8])),
        ("out: shares memory with log_a", lambda s: ops.decay_scan(s[..., :8], b, out=s[..., :8])),
        ("out: shares memory with x", lambda s: ops.logsumexp_scan(s[:, 1:], out=s[:, :-1])),
        (
            "out: shares memory with gamma",
            lambda s: ops.exp_product_scan(s[:1], out=s.reshape(-1)[3:643].reshape(1, 40, 16)),
        ),
        ("log_out: shares memory with gamma", lambda s: ops.exp_product_scan(s, log_out=s)),
        ("log_out: shares memory with out", lambda s: ops.exp_product_scan(a, out=s[..., :8], log_out=s[..., :8])),
        ("out: shares memory with carry", lambda s: ops.logsumexp_scan(a[0], carry=s[0, 0, :8], out=s[0, :, :8])),
        ("out: shares memory with logits", lambda s: ops.token_logprobs(s[0], targets, out=s.reshape(-1)[:40])),
        (
            "out: shares memory with targets",
            lambda s: ops.token_logprobs(logits, targets, out=targets.view(np.float32)),
        ),
        (
            "out: shares memory with grad",
            lambda s: ops.token_logprobs_backward(s.reshape(-1)[:40], logits, targets, out=s[0]),
        ),
        (
            "out: shares memory with logits",
            lambda s: ops.token_logprobs_backward(flat[:39].copy(), s[0, 1:], targets[1:], out=s[0, :-1]),
        ),
    ]:
        mine = store.copy()
        with pytest.raises(ValueError, match=message):
            call(mine)
        assert np.array_equal(mine, store) and not targets.any(), message
    # The same array is fine, and so are channels beside one another.
    mine, want = store.copy(), ops.decay_scan(a, b, reverse=True)
    assert np.array_equal(ops.decay_scan(mine[..., :8], mine[..., 8:], out=mine[..., 8:], reverse=True), want)
    assert np.array_equal(mine[..., :8], a)
    want = ops.token_logprobs_backward(flat[:40].copy(), logits, targets)
    assert np.array_equal(ops.token_logprobs_backward(flat[:40].copy(), logits, targets, out=logits), want)


def test_memory_that_kernels_would_misread_is_refused():
    x, targets = numbers((3, 4), -1.0, 1.0, 1), np.zeros(3, int)
    one, grad = np.zeros((1, 4), np.float32), np.zeros(3, np.float32)
    piled = np.lib.stride_tricks.as_strided(x.copy(), (3, 4), (0, 4))
    for error, message, call in [
        (ValueError, "logits: found a stride of 0", lambda: ops.token_logprobs(np.broadcast_to(one, (3, 4)), targets)),
        (ValueError, "logits: .*row stride", lambda: ops.token_logprobs(x[::-1], targets)),
        (ValueError, "out: found a stride of 0", lambda: ops.logsumexp_scan(x, out=piled)),
        (TypeError, "x: found >f4 of the other byte order", lambda: ops.logsumexp_scan(x.astype(">f4"))),
        (TypeError, "targets: found >i4 of the other byte order", lambda: ops.token_logprobs(x, targets.astype(">i4"))),
        (TypeError, "x: found a masked array", lambda: ops.logsumexp_scan(np.ma.masked_array(x, x > 0))),
        (TypeError, "targets: .*found list", lambda: ops.token_logprobs(x, [0, 1, 2])),
        (TypeError, "b: .*found tuple", lambda: ops.decay_scan(x, (x.ctypes.data, (3, 4), (4, 1), 2, 32, 1, 0, False))),
        (TypeError, "targets: found float64", lambda: ops.token_logprobs(x, np.full(3, np.nan))),
        (
            ValueError,
            "target -1 of row 1 lies outside",
            lambda: ops.token_logprobs_backward(grad, x, np.array([0, -1, 0])),
        ),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0), (0, 2, 5, 3)])
def test_empty_arrays_of_any_axis(shape):
    x, carry = np.zeros(shape, np.float32), np.ones(shape[:-2] + shape[-1:], np.float32)
    for call, inputs in ((ops.decay_scan, (x, x)), (ops.logsumexp_scan, (x,)), (ops.exp_product_scan, (x,))):
        y, last = call(*inputs, carry=carry, return_carry=True)
        assert y.shape == shape and np.array_equal(last, carry)
    if shape[-1] > 0:
        targets = np.zeros(shape[:-1], int)
        assert ops.token_logprobs(x, targets).shape == shape[:-1]
        assert ops.token_logprobs_backward(np.zeros(shape[:-1], np.float32), x, targets).shape == shape


def test_arrays_of_several_libraries_serve_together():
    torch = pytest.importorskip("torch")
    log_a, b = numbers((4, 8), -0.5, 0.0, 1), numbers((4, 8), -1.0, 1.0, 2)
    want = ops.decay_scan(log_a, b)
    assert np.array_equal(ops.decay_scan(log_a, torch.tensor(b)), want)
    assert np.array_equal(ops.decay_scan(torch.tensor(log_a), b).numpy(), want)
    targets = torch.zeros(4, dtype=torch.int32)
    assert np.array_equal(ops.token_logprobs(b, targets), ops.token_logprobs(b, targets.numpy()))


def test_tensors_of_which_values_or_gradients_would_be_lost_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.rand(3, 4)
    for error, message, call in [
        (ValueError, "x: requires a gradient", lambda: ops.logsumexp_scan(x.clone().requires_grad_())),
        (ValueError, "out: requires a gradient", lambda: ops.logsumexp_scan(x, out=x.clone().requires_grad_())),
        (ValueError, "x: .*negated", lambda: ops.logsumexp_scan(torch._neg_view(x))),
        (TypeError, "x: ", lambda: ops.logsumexp_scan(x.to_sparse())),
        (ValueError, "x: requires a gradient", lambda: torch.func.grad(lambda x: ops.logsumexp_scan(x).sum())(x)),
        (TypeError, "x: ", lambda: torch.vmap(ops.logsumexp_scan)(x[None])),
    ]:
        with pytest.raises(error, match=message):
            call()
    with torch.no_grad():
        ops.logsumexp_scan(x.clone().requires_grad_())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="x: requires a gradient"):
        ops.logsumexp_scan(torch.autograd.forward_ad.make_dual(x, x))
    saved = x.clone()
    product = saved * x.clone().requires_grad_()
    ops.logsumexp_scan(x, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_threads_of_python_compute_at_once():
    log_a, b = numbers((64, 400, 32), -0.3, 0.0, 14), numbers((64, 400, 32), -1.0, 1.0, 15)
    want = ops.decay_scan(log_a, b)
    got = [None] * 4

    def work(i):
        for _ in range(20):
            got[i] = ops.decay_scan(log_a, b, threads=1 + i % 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for h in got:
        assert np.array_equal(h, want)


def test_a_forked_child_has_threads_of_its_own():
    log_a, b = numbers((64, 400, 32), -0.3, 0.0, 14), numbers((64, 400, 32), -1.0, 1.0, 15)
    want = ops.decay_scan(log_a, b, threads=2)
    assert true_in_a_fork(lambda: np.array_equal(ops.decay_scan(log_a, b, threads=2), want))


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = numbers((2, 40, 8), -3.0, 3.0, 16).astype(ml_dtypes.bfloat16)
    y = ops.logsumexp_scan(x)
    assert y.dtype == ml_dtypes.bfloat16
    want = logsumexp(x.astype(np.float64), np.float64(-np.inf))[0]
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2.0**-8, atol=2.0**-8)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="out: is read-only"):
        ops.logsumexp_scan(x, out=x)


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    for dtype, tolerance in [(jnp.float32, 2e-5), (jnp.bfloat16, 2.0**-7)]:
        log_a = jnp.asarray(numbers((2, 50, 8), -0.5, 0.0, 17), dtype)
        b = jnp.asarray(numbers((2, 50, 8), -1.0, 1.0, 18), dtype)
        before = np.asarray(b, np.float64)
        h, last = ops.decay_scan(log_a, b, return_carry=True)
        assert isinstance(h, jax.Array) and h.dtype == dtype
        want, want_last = decay(np.asarray(log_a, np.float64), before, 0.0)
        np.testing.assert_allclose(np.asarray(h, np.float64), want, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(last, want_last, rtol=2e-5, atol=2e-5)
        assert np.array_equal(np.asarray(b, np.float64), before)
        # A result has memory of its own, though JAX's arrays are made once and never written to.
        kept = np.asarray(h, np.float64).copy()
        other = ops.decay_scan(log_a, b * 2)
        assert np.array_equal(np.asarray(h, np.float64), kept)
        assert not np.array_equal(np.asarray(other, np.float64), kept)


def test_jax_arrays_that_are_not_taken():
    jax = pytest.importorskip("jax")
    x = jax.numpy.full((4, 16), -0.1, "float32")
    with pytest.raises(ValueError, match="out: is read-only"):
        ops.logsumexp_scan(np.zeros((4, 16), np.float32), out=x)
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(lambda x: ops.decay_scan(x, x))(x)
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(lambda b: ops.decay_scan(x, b))(x)
    layout = pytest.importorskip("jax.experimental.layout")
    if hasattr(layout, "Format"):
        transposed = jax.device_put(x, layout.Format(layout.Layout((1, 0)), x.sharding))
        with pytest.raises(ValueError, match="side by side"):
            ops.decay_scan(transposed, x)
    code = """
import jax, numpy as np
from mmrec import ops
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("one",))
on_both = jax.device_put(np.ones((4, 16), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "one")))
try:
    ops.decay_scan(on_both, on_both)
except ValueError as fault:
    print(fault)
on_second = jax.device_put(np.ones((4, 16), np.float32), jax.devices()[1])
print(ops.decay_scan(on_second, on_second).device.id)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "log_a: found an array on 2 devices, expected one device\n1\n", done.stderr
