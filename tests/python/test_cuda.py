"""The package on a GPU: models against those on the CPU, kernels on arrays that lie there against float64.

scripts/test-python --emulated runs all of this on the host's emulation of a device, with a smaller model.
"""

import asyncio
import ctypes
import json
import os

import numpy as np
import pytest

import mmrec
from mmrec import ops

from conftest import FIXTURES, begun, logprobs, python, records, references

CUDA = 2  # as DLPack numbers devices


def gpu_name():
    try:
        return mmrec.Model.load(FIXTURES / "tiny", device="cuda").info.device_name
    except mmrec.DeviceUnavailable:
        return None


GPU = gpu_name()
IS_EMULATED = GPU == "emulated device"
PATH = FIXTURES / "tiny" if IS_EMULATED else None
TEXTS = [
    "Once upon a time",
    "The dog ran to the park. " * (4 if IS_EMULATED else 40),
    "a",
    "They were happy. " * (8 if IS_EMULATED else 200),
]
needs_gpu = pytest.mark.skipif(GPU is None, reason="no GPU")


@pytest.fixture(scope="module")
def here():
    return mmrec.Model.load(PATH, device="cpu")


@pytest.fixture(scope="module")
def there():
    return mmrec.Model.load(PATH, device="cuda", precision="fp32")


@pytest.fixture(scope="module")
def words():
    return mmrec.Tokenizer.load(PATH)


def test_the_cpu_loads_no_library_of_cuda():
    code = """
import mmrec
mmrec.Scorer(mmrec.Model.load(device="cpu")).score([[1, 2, 3]])
print([line for line in open("/proc/self/maps") if "libcuda" in line or "libcublas" in line or "libnv" in line])
"""
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@needs_gpu
def test_a_model_in_fp32_is_told_what_bf16_gives():
    for options in ({}, {"precision": "fp32"}):
        said = []
        model = mmrec.Model.load(FIXTURES / "upstream" / "segments", device="cuda", on_warning=said.append, **options)
        assert model.info.precision == "fp32"
        assert sum("precision='bf16'" in line for line in said) == (not options)


@needs_gpu
def test_a_model_is_batch_invariant_if_it_is_asked_for():
    folder = FIXTURES / "tiny"
    assert mmrec.Model.load(folder, device="cuda", precision="bf16", batch_invariant=True).info.batch_invariant
    assert not mmrec.Model.load(folder, device="cpu", batch_invariant=True).info.batch_invariant


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(mmrec.DeviceUnavailable, match="999|CUDA"):
        mmrec.Model.load(device="cuda:999")


@needs_gpu
def test_logits_and_logprobs_are_those_of_the_cpu(here, there, words):
    assert there.info.device == "cuda" and there.info.fingerprint == here.info.fingerprint
    ids = [words.encode(text) for text in TEXTS]
    for want, got in zip(*(mmrec.Scorer(model).score(ids) for model in (here, there))):
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-4, atol=2e-4)
    sessions = [begun(model, ids[1]) for model in (here, there)]
    for session in sessions:
        session.step([5])
    np.testing.assert_allclose(sessions[1].logits(), sessions[0].logits(), rtol=1e-4, atol=5e-4)


@needs_gpu
def test_many_are_generated_as_alone(there, words):
    options = dict(max_tokens=12, temperature=0.0)
    alone = [begun(there, words.encode(text)).generate(words, **options) for text in TEXTS]
    generator = mmrec.Generator(there, words, slots=3)
    for got, want in zip(generator.generate(TEXTS, **options), alone):
        assert list(got.tokens) == list(want.tokens)

    async def streamed():
        async def one(text):
            return "".join([piece async for piece in generator.stream(text, **options)])

        return await asyncio.gather(*(one(text) for text in TEXTS))

    assert asyncio.run(streamed()) == [result.text for result in alone]


@needs_gpu
def test_all_gpus_score_what_one_scores(words):
    models = mmrec.Model.load_on_gpus(PATH, precision="fp32")
    assert [model.info.gpu for model in models] == list(range(len(models)))
    assert not IS_EMULATED or len(models) == 2
    ids = [words.encode(text) for text in TEXTS * 4]
    for got, want in zip(mmrec.Scorer(models).score(ids), mmrec.Scorer(models[0]).score(ids)):
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


def score_corpus(corpus, folder, *options):
    """The log-probs and devices of mmrec.score's records, by name."""
    model = ["-m", PATH or mmrec.bundled_model(), "--precision", "fp32"]
    options = [*model, "--logprobs", "--partition-mib", "0.0005", *options]
    done = python("-m", "mmrec.score", corpus, "-o", folder, *options)
    assert done.returncode == 0, done.stderr
    written = records(folder)
    found = {record["name"]: (record["logprobs"], record["device"]) for record in written}
    assert len(found) == len(written)
    return found


@needs_gpu
@pytest.mark.parametrize("on", ["all GPUs", "Ray"])
def test_a_corpus_is_scored_by_gpus(tmp_path, on):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(3) for text in TEXTS))
    expected = score_corpus(corpus, tmp_path / "cpu", "--device", "cpu", "--no-ray")
    assert len(expected) == 3 * len(TEXTS)
    if on == "Ray":
        pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2 if IS_EMULATED else 1})
        try:
            found = score_corpus(corpus, tmp_path / "gpus", "--device", "cuda", "--ray-address", cluster.address)
        finally:
            cluster.shutdown()
    else:
        found = score_corpus(corpus, tmp_path / "gpus", "--device", "cuda:all", "--no-ray")
    assert expected.keys() == found.keys()
    for name, (want, _) in expected.items():
        assert found[name][1] == "cuda"
        np.testing.assert_allclose(found[name][0], want, rtol=1e-4, atol=2e-4)


class _EmulatedArray:
    """Memory of the host that DLPack is told is a device's, as that of the emulated device is."""

    __module__ = "emulated"

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.device = array, array.shape, array.dtype, None

    def __array_namespace__(self):
        return _EmulatedArray

    @staticmethod
    def empty(shape, dtype, device):
        return _EmulatedArray(np.full(shape, np.nan, dtype))

    float32 = np.float32

    def __dlpack_device__(self):
        return CUDA, 0

    def __dlpack__(self, **kwargs):
        capsule = self.array.__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        # DLTensor: the address of the data, then the device's type.
        ctypes.c_int32.from_address(address(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = CUDA
        return capsule

    def block_until_ready(self):
        return self


def _arrays(library):
    """Puts an array of NumPy on the GPU, and gets one from there."""
    if library == "emulated":
        return (_EmulatedArray, lambda x: x.array) if IS_EMULATED else pytest.skip("for the emulated device")
    module = pytest.importorskip(library)
    if IS_EMULATED:
        pytest.skip("for a real device")
    if library == "torch":
        return (lambda x: module.from_numpy(x).cuda()), (lambda x: x.cpu().numpy())
    if library == "jax":
        return (
            (module.numpy.asarray, np.asarray) if module.default_backend() == "gpu" else pytest.skip("JAX has no GPU")
        )
    return module.asarray, module.asnumpy


@needs_gpu
@pytest.mark.parametrize("library", ["emulated", "cupy", "torch", "jax"])
def test_kernels_take_arrays_on_a_gpu(library):
    put, get = _arrays(library)
    rng = np.random.default_rng(1)
    log_a, b = (rng.uniform(low, high, (3, 217, 40)).astype(np.float32) for low, high in ((-0.5, 0.0), (-1.0, 1.0)))
    h, last = ops.decay_scan(put(log_a), put(b), return_carry=True)
    want, state = references(np)["decay_scan"](log_a.astype(np.float64), b.astype(np.float64), np.zeros((3, 40)), False)
    np.testing.assert_allclose(get(h), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(get(last), state, rtol=2e-5, atol=2e-5)

    logits, targets = rng.uniform(-8, 8, (33, 1000)).astype(np.float32), rng.integers(0, 1000, 33).astype(np.int32)
    grad = rng.uniform(-1, 1, 33).astype(np.float32)
    want, want_back = logprobs(logits, targets, grad)
    np.testing.assert_allclose(get(ops.token_logprobs(put(logits), put(targets))), want, rtol=1e-5, atol=1e-5)
    back = ops.token_logprobs_backward(put(grad), put(logits), put(targets))
    np.testing.assert_allclose(get(back), want_back, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="b: is on another device"):
        ops.decay_scan(put(log_a), b)


@needs_gpu
def test_a_broken_context_raises_and_does_not_end_the_process():
    if IS_EMULATED:
        broken, environment = "", {"MMREC_CUDA_EMULATION_ILLEGAL_ACCESS": "1000"}
    else:
        pytest.importorskip("torch")
        # A failed assertion on the device, which ends its context.
        broken, environment = "import torch; torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')]", {}
    code = f"""
import mmrec
session = mmrec.Model.load({os.fspath(PATH) if PATH else None!r}, device="cuda").new_session()
session.prefill([1, 2, 3])
{broken}
found = set()
for _ in range(2000):
    try:
        session.step([1])
        session.logits()
    except mmrec.CudaError as fault:
        found.add(str(fault))
    if found:
        break
assert len(found) == 1 and "\\n" not in found.pop()
for _ in range(2):
    try:
        session.reset()
        session.prefill([1])
        print("went on")
    except mmrec.CudaError as fault:
        print("CudaError")
try:
    mmrec.Model.load(device="cuda")
    print("went on")
except (mmrec.DeviceUnavailable, mmrec.CudaError):
    print("refused")
"""
    done = python("-c", code, **environment)
    assert done.returncode == 0 and done.stdout == "CudaError\nCudaError\nrefused\n", done.stdout + done.stderr
