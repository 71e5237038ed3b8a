"""mmrec.ops: the kernels on arrays of NumPy, PyTorch and JAX, against their equations in float64."""

import numpy as np
import pytest

from conftest import at_once, expect_errors, logprobs, python, references, true_in_a_fork
from mmrec import ops


WANT = references(np)
SHAPES = [(1, 1), (7, 5), (2, 33, 16), (2, 3, 65, 8), (3, 1, 300)]


def numbers(shape, low, high, seed):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name,tolerance", [("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 2.0**-8)])
def test_scans_agree_with_their_equations(shape, reverse, name, tolerance):
    dtype = np.dtype(name if name != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16)
    carry = numbers(shape[:-2] + shape[-1:], -1.0, 0.0, 1)
    for scan, ranges in [
        ("exp_product_scan", [(0.9, 1.0)]),
        ("logsumexp_scan", [(-3.0, 3.0)]),
        ("decay_scan", [(-0.5, 0.05), (-1.0, 1.0)]),
    ]:
        inputs = [numbers(shape, low, high, 2 + i).astype(dtype) for i, (low, high) in enumerate(ranges)]
        y, last = getattr(ops, scan)(*inputs, carry=carry, return_carry=True, reverse=reverse)
        want, want_last = WANT[scan](*(x.astype(np.float64) for x in [*inputs, carry]), reverse)
        assert y.dtype == dtype and y.shape == shape and last.dtype == np.float32
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(last, want_last, rtol=2e-5, atol=2e-5)


def test_log_out_and_out_are_written_to():
    gamma = numbers((2, 20, 4), 0.8, 1.0, 6)
    out, log_out = np.empty_like(gamma), np.empty_like(gamma)
    assert ops.exp_product_scan(gamma, out=out, log_out=log_out) is out
    np.testing.assert_allclose(np.exp(log_out), out, rtol=1e-5)
    np.testing.assert_allclose(out, WANT["exp_product_scan"](gamma.astype(np.float64), 0.0, False)[0], rtol=2e-5)


def test_any_strides_serve_without_a_copy():
    # [batch, time, heads, dim], seen as [batch, heads, time, dim], and written to likewise.
    stored = numbers((2, 30, 3, 8), -0.5, 0.0, 7)
    log_a = stored.transpose(0, 2, 1, 3)
    b = numbers((2, 3, 90, 8), -1.0, 1.0, 8)[:, :, ::3]
    place = np.zeros((2, 30, 3, 16), np.float32)
    h = place.transpose(0, 2, 1, 3)[..., 4:12]
    assert ops.decay_scan(log_a, b, out=h) is h
    want, _ = WANT["decay_scan"](log_a.astype(np.float64), b.astype(np.float64), 0.0, False)
    np.testing.assert_allclose(h, want, rtol=2e-5, atol=2e-5)
    assert not place[..., :4].any() and not place[..., 12:].any()


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 1000)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_logprobs_and_their_derivative(shape, index):
    logits = numbers(shape, -8.0, 8.0, 11)
    targets = np.random.default_rng(12).integers(0, shape[-1], shape[:-1]).astype(index)
    grad = numbers(shape[:-1], -1.0, 1.0, 13)
    want, want_back = logprobs(logits, targets, grad)
    np.testing.assert_allclose(ops.token_logprobs(logits, targets), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ops.token_logprobs_backward(grad, logits, targets), want_back, rtol=1e-5, atol=1e-6)


def test_what_is_wrong_is_named():
    x, y, four, by_index = np.zeros((4, 8), np.float32), np.zeros((4, 9), np.float32), np.zeros(4, int), [0, 1, 2, 3]
    piled = np.lib.stride_tricks.as_strided(x.copy(), (4, 8), (0, 4))
    same_rows = np.broadcast_to(x[:1], (4, 8))
    by_hand = (x.ctypes.data, (4, 8), (8, 1), 2, 32, 1, 0, False)
    scan, decay, rows, back = ops.logsumexp_scan, ops.decay_scan, ops.token_logprobs, ops.token_logprobs_backward
    expect_errors(
        (TypeError, "found list, expected an array that speaks DLPack", lambda: scan([[1.0]])),
        (TypeError, "found float64, expected float32, float16 or bfloat16", lambda: scan(x.astype(float))),
        (TypeError, "b: found float16, expected the type of log_a", lambda: decay(x, x.astype(np.float16))),
        (TypeError, "targets: found uint64, expected int32 or int64", lambda: rows(x, np.zeros(4, np.uint64))),
        (TypeError, "carry: found float64, expected float32$", lambda: scan(x, carry=np.zeros(8))),
        (TypeError, "targets: found float64", lambda: rows(x, np.full(4, np.nan))),
        (TypeError, "targets: .*found list", lambda: rows(x, by_index)),
        (TypeError, "b: .*found tuple", lambda: decay(x, by_hand)),
        (TypeError, "x: found >f4 of the other byte order", lambda: scan(x.astype(">f4"))),
        (TypeError, "targets: found >i4 of the other byte order", lambda: rows(x, four.astype(">i4"))),
        (TypeError, "x: found a masked array", lambda: scan(np.ma.masked_array(x, x > 0))),
        (ValueError, "x: found 1 dimensions", lambda: scan(x[0])),
        (ValueError, "found 5 dimensions, expected at most 4", lambda: scan(np.zeros((1,) * 5, np.float32))),
        (ValueError, r"b: found shape \[4, 9\], expected that of log_a, \[4, 8\]", lambda: decay(x, y)),
        (ValueError, r"carry: found shape \[4\], expected \[8\]", lambda: scan(x, carry=np.zeros(4, np.float32))),
        (ValueError, r"targets: found shape \[3\], expected that of the rows, \[4\]", lambda: rows(x, four[:3])),
        (ValueError, "out", lambda: rows(x, four, out=np.zeros(5, np.float32))),
        (ValueError, r"threads: found 2147483648, expected", lambda: scan(x, threads=2**31)),
        (ValueError, "channels", lambda: scan(np.zeros((8, 4), np.float32).T)),
        (ValueError, "out: found a stride of 0", lambda: scan(x, out=piled)),
        (ValueError, "logits: found a stride of 0", lambda: rows(same_rows, four)),
        (ValueError, "logits: .*row stride", lambda: rows(x[::-1], four)),
        (ValueError, "target", lambda: rows(x, np.array([0, 8, 0, 0]))),
        (ValueError, "target -1 of row 1 lies", lambda: back(np.zeros(4, np.float32), x, np.array([0, -1, 0, 0]))),
    )


def test_read_only_memory_is_not_written_to(tmp_path):
    x = numbers((3, 4), -1.0, 0.0, 1)
    locked = np.zeros_like(x)
    locked.flags.writeable = False
    np.zeros_like(x).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=x.shape)
    view = memoryview(bytes(x.nbytes)).cast("B").cast("f", x.shape)
    targets, rows = np.zeros(3, int), np.zeros(3, np.float32)
    rows.flags.writeable = False
    scan = ops.logsumexp_scan
    outs = (locked, mapped, view, bytes(x.nbytes))
    expect_errors(
        *((ValueError, "^out: is read-only", lambda out=out: scan(x, out=out)) for out in outs),
        (ValueError, "^log_out: is read-only", lambda: ops.exp_product_scan(x, log_out=locked)),
        (ValueError, "^out: is read-only", lambda: ops.token_logprobs(x, targets, out=rows)),
        (ValueError, "^out: is read-only", lambda: ops.token_logprobs_backward(rows, x, targets, out=locked)),
    )
    assert not locked.any() and not rows.any()
    locked_x = x.copy()
    locked_x.flags.writeable = False
    assert np.array_equal(ops.logsumexp_scan(locked_x), ops.logsumexp_scan(x))  # reading it is fine


def test_what_is_written_shares_no_memory_with_what_is_read():
    store = numbers((2, 40, 16), -0.5, 0.0, 1)
    a, b = store[..., :8].copy(), store[..., 8:].copy()
    targets, logits = np.zeros(40, np.int32), store[0]
    flat = store.reshape(-1)
    decay, product, lse = ops.decay_scan, ops.exp_product_scan, ops.logsumexp_scan
    rows, back = ops.token_logprobs, ops.token_logprobs_backward
    for name, other, call in [
        ("out", "b", lambda s: decay(a[:, 1:], s[:, 1:, :8], out=s[:, :-1, :8])),
        ("out", "b", lambda s: decay(a, s[..., :8], out=s[..., 4:12])),
        ("out", "b", lambda s: decay(a, s[:, :, :8], out=s[:, ::-1, :8])),
        ("out", "log_a", lambda s: decay(s[..., :8], b, out=s[..., :8])),
        ("out", "x", lambda s: lse(s[:, 1:], out=s[:, :-1])),
        ("out", "gamma", lambda s: product(s[:1], out=s.reshape(-1)[3:643].reshape(1, 40, 16))),
        ("log_out", "gamma", lambda s: product(s, log_out=s)),
        ("log_out", "out", lambda s: product(a, out=s[..., :8], log_out=s[..., :8])),
        ("out", "carry", lambda s: lse(a[0], carry=s[0, 0, :8], out=s[0, :, :8])),
        ("out", "logits", lambda s: rows(s[0], targets, out=s.reshape(-1)[:40])),
        ("out", "targets", lambda s: rows(logits, targets, out=targets.view(np.float32))),
        ("out", "grad", lambda s: back(s.reshape(-1)[:40], logits, targets, out=s[0])),
        ("out", "logits", lambda s: back(flat[:39].copy(), s[0, 1:], targets[1:], out=s[0, :-1])),
    ]:
        mine = store.copy()
        with pytest.raises(ValueError, match=f"{name}: shares memory with {other}"):
            call(mine)
        assert np.array_equal(mine, store) and not targets.any(), (name, other)
    # The same array is fine, and so are channels beside one another.
    mine, want = store.copy(), ops.decay_scan(a, b, reverse=True)
    assert np.array_equal(ops.decay_scan(mine[..., :8], mine[..., 8:], out=mine[..., 8:], reverse=True), want)
    assert np.array_equal(mine[..., :8], a)
    want = ops.token_logprobs_backward(flat[:40].copy(), logits, targets)
    assert np.array_equal(ops.token_logprobs_backward(flat[:40].copy(), logits, targets, out=logits), want)


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
    scan = ops.logsumexp_scan
    expect_errors(
        (ValueError, "x: requires a gradient", lambda: scan(x.clone().requires_grad_())),
        (ValueError, "out: requires a gradient", lambda: scan(x, out=x.clone().requires_grad_())),
        (ValueError, "x: .*negated", lambda: scan(torch._neg_view(x))),
        (ValueError, "x: requires a gradient", lambda: torch.func.grad(lambda x: scan(x).sum())(x)),
        (TypeError, "x: ", lambda: scan(x.to_sparse())),
        (TypeError, "x: ", lambda: torch.vmap(scan)(x[None])),
    )
    with torch.no_grad():
        ops.logsumexp_scan(x.clone().requires_grad_())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="x: requires a gradient"):
        ops.logsumexp_scan(torch.autograd.forward_ad.make_dual(x, x))
    saved = x.clone()
    product = saved * x.clone().requires_grad_()
    ops.logsumexp_scan(x, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_threads_of_python_compute_at_once_and_a_forked_child_has_its_own():
    log_a, b = numbers((64, 400, 32), -0.3, 0.0, 14), numbers((64, 400, 32), -1.0, 1.0, 15)
    want = ops.decay_scan(log_a, b)
    got = [None] * 4

    def work(i):
        for _ in range(20):
            got[i] = ops.decay_scan(log_a, b, threads=1 + i % 2)

    at_once(4, work)
    for h in got:
        assert np.array_equal(h, want)
    assert true_in_a_fork(lambda: np.array_equal(ops.decay_scan(log_a, b, threads=2), want))


def test_read_only_bfloat16_is_not_written_to():
    x = np.zeros((2, 4), pytest.importorskip("ml_dtypes").bfloat16)
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
        want, want_last = WANT["decay_scan"](np.asarray(log_a, np.float64), before, 0.0, False)
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
    expect_errors(
        (ValueError, "out: is read-only", lambda: ops.logsumexp_scan(np.zeros((4, 16), np.float32), out=x)),
        (TypeError, "tracer", lambda: jax.jit(lambda x: ops.decay_scan(x, x))(x)),
        (TypeError, "tracer", lambda: jax.jit(lambda b: ops.decay_scan(x, b))(x)),
    )
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
    done = python("-c", code, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert done.stdout == "log_a: found an array on 2 devices, expected one device\n1\n", done.stderr
