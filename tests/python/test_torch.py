"""mmrec.torch: the kernels as PyTorch operators. Values and gradients against float64 of PyTorch's own operators;
torch.compile and opcheck."""

import pytest

torch = pytest.importorskip("torch")

import mmrec.torch as mt  # noqa: E402
from conftest import references  # noqa: E402
from mmrec import ops  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def numbers(shape, low, high, seed, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(device, dtype)


PLAIN = references(torch)
RANGES = {"decay_scan": [(-0.5, 0.05), (-1.0, 1.0)], "exp_product_scan": [(0.5, 0.99)], "logsumexp_scan": [(-3.0, 3.0)]}
CASES = {name: (getattr(mt, name), PLAIN[name], ranges) for name, ranges in RANGES.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (9, 4), (2, 40, 16), (2, 3, 33, 8)])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_of_scans(device, name, reverse, shape, dtype, bound):
    ours, plain, ranges = CASES[name]
    inputs = [numbers(shape, low, high, 10 + i, device, dtype) for i, (low, high) in enumerate(ranges)]
    inputs = [x.requires_grad_() for x in [*inputs, numbers(shape[:-2] + shape[-1:], -1.0, 1.0, 3, device)]]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y, last = ours(*inputs, reverse=reverse, return_carry=True)
    want, want_last = plain(*wide, reverse)
    torch.testing.assert_close(y.double(), want, rtol=bound / 3, atol=bound / 3)
    torch.testing.assert_close(last.double(), want_last, rtol=3e-5, atol=3e-5)
    g, g_last = numbers(shape, -1.0, 1.0, 4, device, dtype), numbers(last.shape, -1.0, 1.0, 5, device)
    got = torch.autograd.grad((y, last), inputs, (g, g_last))
    expected = torch.autograd.grad((want, want_last), wide, (g.double(), g_last.double()))
    for x, mine, theirs in zip(inputs, got, expected):
        assert mine.dtype == x.dtype
        scale = theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound * scale)


def plain_logprobs(logits, targets):
    return torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]


def cases_of_derivatives():
    """Functions of a few tensors, plain ones, and inputs; each gives a tuple."""
    for name, (ours, plain, ranges) in CASES.items():
        for reverse in (False, True):
            inputs = [numbers((2, 5, 3), low, high, 10 + i) for i, (low, high) in enumerate(ranges)]
            yield pytest.param(
                lambda *x, ours=ours, reverse=reverse: ours(*x, reverse=reverse, return_carry=True),
                lambda *x, plain=plain, reverse=reverse: plain(*x, reverse),
                [*inputs, numbers((2, 3), -1.0, 1.0, 3)],
                id=f"{name}-{reverse}",
            )
    targets = torch.tensor([1, 8, 0, 3])
    yield pytest.param(
        lambda x: (mt.token_logprobs(x, targets),),
        lambda x: (plain_logprobs(x, targets),),
        [numbers((4, 9), -3.0, 3.0, 1)],
        id="token_logprobs",
    )


@pytest.mark.parametrize("ours,plain,inputs", list(cases_of_derivatives()))
def test_derivatives_of_any_order_and_mode(ours, plain, inputs):
    every = tuple(range(len(inputs)))

    def loss(function):
        def weights(y):
            return torch.linspace(0.1, 1.0, y.numel(), dtype=y.dtype).view(y.shape)

        return lambda *x: sum((y**3 * weights(y)).sum() for y in function(*x))

    def thrice(function, x):
        """Gradients of first to third order, each of the squares of the one before."""
        x, found, value = [one.clone().requires_grad_() for one in x], [], None
        for _ in range(3):
            value = loss(function)(*x) if value is None else sum((g * g).sum() for g in found[-len(x) :])
            found += torch.autograd.grad(value, x, create_graph=True)
        return found

    def forward(function, x):
        """Tangents by each input alone, and of the gradient."""
        found = []
        for i in every:
            with torch.autograd.forward_ad.dual_level():
                duals = [
                    torch.autograd.forward_ad.make_dual(one, torch.cos(one)) if j == i else one
                    for j, one in enumerate(x)
                ]
                found += [torch.autograd.forward_ad.unpack_dual(y).tangent for y in function(*duals)]
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(one.clone().requires_grad_(), torch.cos(one)) for one in x]
            for gradient in torch.autograd.grad(loss(function)(*duals), duals):
                found.append(torch.autograd.forward_ad.unpack_dual(gradient).tangent)
        return found

    func = torch.func
    for what in (
        thrice,
        forward,
        lambda f, x: func.grad(loss(f), every)(*x),
        lambda f, x: [h for row in func.hessian(loss(f), every)(*x) for h in row],
        lambda f, x: [h for row in func.jacrev(func.jacfwd(loss(f), every), every)(*x) for h in row],
        lambda f, x: (
            func.vmap(func.grad(lambda *y: sum((z * z).sum() for z in f(*y)), every))(*x) if len(x) > 1 else ()
        ),
    ):
        got, want = what(ours, inputs), what(plain, [x.double() for x in inputs])
        assert len(got) == len(want)
        for mine, theirs in zip(got, want):
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-5 * (theirs.abs().max().item() + 1e-3))


@pytest.mark.filterwarnings("error")
def test_vmap_is_the_call_on_more_axes():
    log_a, b = numbers((2, 3, 2, 9, 4), -0.5, 0.0, 1), numbers((2, 3, 2, 9, 4), -1.0, 1.0, 2)
    want = mt.decay_scan(log_a, b)
    assert torch.equal(want[1, 2], mt.decay_scan(log_a[1, 2], b[1, 2]))
    assert torch.equal(torch.vmap(torch.vmap(mt.decay_scan))(log_a, b), want)
    one_decay = torch.vmap(mt.decay_scan, (None, 1), 1)(log_a[0, 0, 0], b[0, 0].transpose(0, 1))
    assert torch.equal(one_decay[:, 1], mt.decay_scan(log_a[0, 0, 0], b[0, 0, 1]))
    logits, targets = numbers((2, 3, 9), -1.0, 1.0, 3), torch.tensor([1, 2, 8])
    assert torch.equal(
        torch.vmap(mt.token_logprobs, (0, None))(logits, targets)[1], mt.token_logprobs(logits[1], targets)
    )
    with pytest.raises(ValueError, match="found 1 dimensions"):
        torch.vmap(mt.logsumexp_scan)(log_a[0, 0, 0])
    with pytest.raises(NotImplementedError, match="call mmrec.torch.logsumexp_scan"):
        torch.func.grad(lambda x: torch.ops.mmrec.logsumexp_scan(x, None, False)[0].sum())(log_a[0, 0])


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 2, 5, 3)])
def test_gradients_of_empty_tensors(shape):
    for create_graph in (False, True):
        for ours, _, ranges in CASES.values():
            inputs = [torch.zeros(s, requires_grad=True) for s in [shape] * len(ranges) + [shape[:-2] + shape[-1:]]]
            outputs = ours(*inputs, return_carry=True)
            for x, g in zip(inputs, torch.autograd.grad(outputs, inputs, outputs, create_graph=create_graph)):
                assert g.shape == x.shape
        logits = torch.zeros(shape, requires_grad=True)
        if logits.shape[-1] > 0:
            y = mt.token_logprobs(logits, torch.zeros(shape[:-1], dtype=torch.long))
            assert torch.autograd.grad(y, logits, y, create_graph=create_graph)[0].shape == shape


def test_shapes_and_types_are_those_of_a_sum():
    decay, b = torch.full((3,), -0.1, requires_grad=True), numbers((2, 5, 3), -1.0, 1.0, 1)
    h = mt.decay_scan(decay, b, torch.tensor(2.0))
    assert torch.equal(h, mt.decay_scan(decay.expand(2, 5, 3).contiguous(), b, torch.full((2, 3), 2.0)))
    assert torch.autograd.grad(h.sum(), decay)[0].shape == (3,)
    layer, x = torch.nn.Linear(3, 3), numbers((2, 5, 3), -1.0, 1.0, 2)
    with torch.autocast("cpu", torch.bfloat16):
        values = layer(x)
        h = mt.decay_scan(decay, values)
        assert values.dtype == torch.bfloat16 and h.dtype == torch.float32
        mt.decay_scan(layer(x), values).float().sum().backward()
    assert torch.equal(h, mt.decay_scan(decay, values.float())) and layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_and_their_gradient_are_those_of_cross_entropy(device):
    logits = numbers((2, 3, 257), -6.0, 6.0, 1, device).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    weight = numbers((2, 3), -1.0, 1.0, 3, device)
    for index in (-100, 4):
        targets = torch.tensor([[1, index, 0], [index, 256, 8]], device=device)
        for dtype in (torch.int32, torch.int64):
            got = -mt.token_logprobs(logits, targets.to(dtype), ignore_index=index)
            want = torch.nn.functional.cross_entropy(
                wide.transpose(1, 2), targets, reduction="none", ignore_index=index
            )
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
            (mine,) = torch.autograd.grad(got, logits, weight)
            (theirs,) = torch.autograd.grad(want, wide, weight.double())
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)
    for wrong in (-1, 257):
        with pytest.raises(ValueError, match=f"target {wrong} of row 0 lies outside"):
            mt.token_logprobs(logits[0].cpu(), torch.tensor([wrong, 0, 0]))


def test_strided_tensors():
    log_a = numbers((2, 30, 3, 8), -0.5, 0.0, 1).transpose(1, 2)
    b = numbers((2, 30, 3, 8), -1.0, 1.0, 2).transpose(1, 2)
    torch.testing.assert_close(mt.decay_scan(log_a, b), mt.decay_scan(log_a.contiguous(), b.contiguous()))
    wide = numbers((2, 3, 8, 30), -1.0, 1.0, 3)
    torch.testing.assert_close(
        mt.logsumexp_scan(wide.transpose(2, 3)), mt.logsumexp_scan(wide.transpose(2, 3).contiguous())
    )
    one = numbers((1, 9), -1.0, 1.0, 4)
    for x in (
        one.expand(5, 9),
        one.expand(2, 5, 9),
        torch._neg_view(one.expand(5, 9)),
        wide[0].transpose(0, 1)[..., ::2],
    ):
        targets = torch.full(x.shape[:-1], 3)
        for call in (mt.logsumexp_scan, lambda x, targets=targets: mt.token_logprobs(x, targets)):
            assert torch.equal(call(x), call(x.resolve_neg().contiguous()))


@pytest.mark.parametrize("name", [*CASES, "token_logprobs"])
def test_opcheck(name):
    ranges = RANGES.get(name, [(-3.0, 3.0)])
    inputs = [numbers((2, 9, 4), low, high, i).requires_grad_() for i, (low, high) in enumerate(ranges)]
    if name == "token_logprobs":
        calls = [(torch.arange(18).view(2, 9) % 4, -100)]
    else:
        calls = [(carry, False) for carry in (None, numbers((2, 4), -1.0, 0.0, 9).requires_grad_())]
    for call in calls:
        torch.library.opcheck(getattr(torch.ops.mmrec, name).default, (*inputs, *call))


def test_compiled_training_step_is_the_eager_one():
    torch.manual_seed(0)
    gates, values, head = (torch.nn.Linear(16, n) for n in (24, 24, 50))
    project = torch.nn.Linear(24, 16)
    x, targets = torch.randn(2, 40, 16), torch.randint(0, 50, (2, 40))

    def loss():
        h = mt.decay_scan(torch.nn.functional.logsigmoid(gates(x)), values(x))
        return -mt.token_logprobs(head(project(h)), targets).mean()

    parameters = [p for module in (gates, values, project, head) for p in module.parameters()]
    eager = loss()
    expected = torch.autograd.grad(eager, parameters)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(compiled, eager)
    for mine, theirs in zip(torch.autograd.grad(compiled, parameters), expected):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_work_goes_to_the_current_stream():
    log_a, b = numbers((8, 4096, 512), -0.5, 0.0, 1, "cuda"), numbers((8, 4096, 512), -1.0, 1.0, 2, "cuda")
    want = mt.decay_scan(log_a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mt.decay_scan(log_a, b * 2.0)  # memory of the stream's is taken by its first call, which may wait
        stream.synchronize()
        torch.cuda._sleep(500_000_000)
        later = b * 2.0
        got = mt.decay_scan(log_a, later)
    assert not stream.query()
    stream.synchronize()
    torch.testing.assert_close(got, want * 2.0, rtol=1e-5, atol=1e-5)


def test_tensors_described_by_hand_are_the_same(monkeypatch):
    """As with a PyTorch that has no table of functions for DLPack."""
    log_a, b = numbers((2, 30, 8), -0.5, 0.0, 1), numbers((2, 30, 8), -1.0, 1.0, 2)[:, ::2].repeat(1, 2, 1)
    want = ops.decay_scan(log_a, b)
    logits, targets = numbers((3, 9), -1.0, 1.0, 3), torch.tensor([0, 8, 4])
    want_logprobs = ops.token_logprobs(logits, targets)
    monkeypatch.setattr(ops._library(b), "is_described", False)
    assert torch.equal(ops.decay_scan(log_a, b), want)
    assert torch.equal(ops.token_logprobs(logits, targets), want_logprobs)
    with pytest.raises(TypeError, match="found a tensor of torch.float64 on cpu"):
        ops.logsumexp_scan(torch.zeros(3, 4, dtype=torch.float64))


def test_errors_are_those_of_ops():
    with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
        mt.logsumexp_scan(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected that of log_a"):
        mt.decay_scan(torch.zeros(3, 4), torch.zeros(3, 5))
