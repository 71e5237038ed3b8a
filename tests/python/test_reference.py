"""Numbers against references that know nothing of this engine: tensors of the public code, and NumPy in float64."""

import subprocess

import numpy as np
import pytest

import mmrec
from conftest import FIXTURES, ppl_records, read_safetensors, summary_of

MODELS = ["hem", "dpg", "mdi", "segments"]


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_logits_are_the_public_codes(name):
    folder = FIXTURES / "upstream" / name
    reference = read_safetensors(folder / "reference.safetensors")
    ids = reference["input_ids"]
    batch, length = ids.shape
    model = mmrec.Model.load(folder, device="cpu")
    session = model.new_session(batch, prefill="steps")
    logprobs = session.score(ids)
    assert logprobs.dtype == np.float32 and logprobs.shape == ids.shape
    np.testing.assert_array_equal(logprobs[:, 0], 0)
    np.testing.assert_allclose(logprobs[:, 1:], reference["logprobs"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(session.logits(), reference["logits"][:, -1], atol=2e-4, rtol=0)
    scores = mmrec.Scorer(model, prefill="steps").score(ids)
    for row, score in zip(reference["logprobs"], scores):
        np.testing.assert_allclose(score.logprobs, row, atol=2e-4, rtol=0)
        assert score.complete and score.nll == pytest.approx(-np.sum(score.logprobs, dtype=np.float64), rel=1e-12)


def test_records_are_mmrec_ppls_to_the_bit(model, tokenizer, programs):
    texts = ["Once upon a time there was a king.", "The river runs north.\nIt is cold.", "x", ""]
    written = ppl_records(programs, [{"text": text} for text in texts], "--split-by", "jsonl", "--per-token")
    theirs = np.asarray([record["logprob"] for record in written if record.get("logprob") is not None], np.float32)
    scores, _ = summary_of(model, tokenizer, texts)
    np.testing.assert_array_equal(np.concatenate([score.logprobs for score in scores]), theirs)


def test_texts_are_mmrec_generates(model, tokenizer, programs):
    command = [programs / "mmrec-generate", "--device", "cpu", "-q", "-p", "The old house", "-n", "24", "--temp", "0"]
    theirs = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    options = {"max_tokens": 24, "temperature": 0, "repetition_penalty": 1.05}  # the latter by generation_config.json
    assert mmrec.generate("The old house", model, **options) in theirs


def test_a_perplexity_is_what_float64_says(model, tokenizer):
    texts = ["Once upon a time", "there was a  king"]
    scores, summary = summary_of(model, tokenizer, texts)
    all_of_them = np.concatenate([score.logprobs.astype(np.float64) for score in scores])
    assert (summary.docs, summary.tokens, summary.words) == (2, all_of_them.size, 8)
    assert summary.ppl == pytest.approx(np.exp(-all_of_them.mean()), rel=1e-12)
    assert summary.word_ppl == pytest.approx(np.exp(-all_of_them.sum() / 8), rel=1e-12)
