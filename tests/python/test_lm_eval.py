"""lm-evaluation-harness over local files: figures equal mmrec's own, whatever is shared or packed."""

import json
import math
import pathlib
import shutil

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import mmrec  # noqa: E402
from conftest import begun, ppl_records, python, summary_of  # noqa: E402
from mmrec import _mmrec, lm_eval as plugin  # noqa: E402

TEXTS = [
    "Once upon a time there was a little girl who had a red ball.",
    "The dog ran to the park. It was a sunny day, and the birds sang.",
    "Tom said hello to the cat.  The cat  said nothing.",
]


class Request:
    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def model():
    return plugin.MMRecLM(device="cpu")


def expected_pair(context, continuation):
    """Step by step: (log-likelihood, is it the argmax at each place)."""
    tokenizer = mmrec.Tokenizer.load()
    ((ids, start),) = _mmrec.encode_pairs(tokenizer, [(context, continuation)], True)
    session = begun(mmrec.Model.load(device="cpu"), ids[:start])
    total, greedy = 0.0, True
    for token in ids[start:]:
        logits = session.logits()[0].astype(np.float64)
        total += logits[token] - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        greedy = greedy and int(logits.argmax()) == token
        session.step([token])
    return total, greedy


def test_pairs_are_those_of_single_steps(model):
    pairs = [(text[:20], text[20:]) for text in TEXTS]
    pairs += [("Once upon a", word) for word in (" time", " mouse", " time there was", " ")]
    pairs += [
        ("", "The dog"),
        ("  ", "a"),
        ("Tom and ", "Sue"),
        ("Once upon a time, there was a little", " girl named"),
    ]
    found = model.loglikelihood([Request(*pair) for pair in pairs])
    for pair, (loglikelihood, greedy) in zip(pairs, found):
        total, is_greedy = expected_pair(*pair)
        assert loglikelihood == pytest.approx(total, rel=1e-5, abs=1e-4), pair
        assert greedy == is_greedy, pair


def test_figures_are_those_of_mmrec_ppl_to_the_bit(model, programs, monkeypatch):
    monkeypatch.setitem(plugin.BRANCH_TOKENS, "cpu", 1 << 30)
    texts = [*TEXTS, " ".join(TEXTS * 5)]
    pairs = [(text[:cut], text[cut:]) for text in texts for cut in (0, 9, 20, 21, len(text))]

    expected = ppl_records(programs, [{"context": one, "continuation": other} for one, other in pairs], "--pairs")
    assert model.loglikelihood([Request(*pair) for pair in pairs]) == [
        (one["loglikelihood"], one["is_greedy"]) for one in expected
    ]
    rows = [{"text": text} for text in texts]
    for length, options in (None, ()), (8, ("--mode", "rolling", "--window", "8")):
        found = plugin.MMRecLM(device="cpu", max_length=length).loglikelihood_rolling([Request(text) for text in texts])
        assert found == [-one["nll"] for one in ppl_records(programs, rows, "--split-by", "jsonl", *options)]


def test_branching_changes_nothing(model, monkeypatch):
    context = " ".join(TEXTS)
    requests = [Request(context, word) for word in (" Then he", " She", " And", "")]
    monkeypatch.setitem(plugin.BRANCH_TOKENS, "cpu", 1 << 30)
    packed = model.loglikelihood(requests)
    monkeypatch.setitem(plugin.BRANCH_TOKENS, "cpu", 0)
    branched = model.loglikelihood(requests)
    for one, other in zip(packed, branched):
        assert one[0] == pytest.approx(other[0], abs=1e-4)
        assert one[1] == other[1]


def test_shared_prompts_change_nothing(model, monkeypatch):
    prompts = [TEXTS[0] + " " + text for text in ("Then", "She was", "They")]
    requests = [Request(prompt, {"until": ["."], "max_gen_toks": 12}) for prompt in prompts]
    monkeypatch.setattr(plugin, "SHARED_TOKENS", 1)
    shared = model.generate_until(requests)
    monkeypatch.setattr(plugin, "SHARED_TOKENS", 1 << 30)
    assert shared == model.generate_until(requests)
    assert all(text and "." not in text for text in shared)


def test_a_jax_model_is_loaded_so_that_prompts_can_be_cut(tmp_path):
    fixtures = pathlib.Path(__file__).parents[1] / "fixtures"
    for file in ("upstream/jax/config.json", "upstream/jax/model.safetensors", "tiny/tokenizer.model"):
        shutil.copy(fixtures / file, tmp_path)
    assert mmrec.Model.load(tmp_path, device="cpu").info.calls == "prompt"
    assert plugin.MMRecLM(path=str(tmp_path), device="cpu")._model.info.calls == "stepwise"


def test_gen_kwargs_without_effect_are_understood_and_others_refused(model):
    with pytest.raises(ValueError, match="num_beams"):
        model.generate_until([Request("a", {"num_beams": 2})])
    plain = model.generate_until([Request("Once upon", {"max_gen_toks": 5})])
    without = {"num_beams": 1, "use_cache": True, "early_stopping": False, "pad_token_id": 0, "no_repeat_ngram_size": 0}
    without |= {"top_k": None, "do_sample": None, "seed": None, "until": None}
    assert model.generate_until([Request("Once upon", {"max_gen_toks": 5, **without})]) == plain


@pytest.mark.parametrize(
    "wrong",
    (
        {"max_gen_toks": "many"},
        {"max_gen_toks": -5},
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": 1.0, "top_k": "x"},
        {"temperature": 1.0, "top_p": [0.5]},
        {"until": 5},
        {"until": ["a", None]},
    ),
    ids=str,
)
def test_wrong_values_of_gen_kwargs_are_refused_in_a_line(model, wrong):
    with pytest.raises(plugin.RefusedOptionError, match="^gen_kwargs: [^\n]+$") as fault:
        model.generate_until([Request("Once upon", wrong)])
    name, value = list(wrong.items())[-1]
    assert name[:4] in str(fault.value) and str(value) in str(fault.value)


def test_model_args_of_other_models_are_understood():
    found = plugin.MMRecLM.create_from_arg_string("device=cpu,dtype=float32,trust_remote_code=True,max_length=16")
    assert found.max_length == 16 and found.get_model_info()["model_dtype"] == "fp32"
    assert plugin.MMRecLM(device="cpu", dtype="torch.bfloat16").get_model_info()["model_dtype"] == "bf16"
    for wrong, message in (
        ("peft=x", "found peft, expected"),
        ("dtype=float64", "found 'float64'"),
        ("threads=x", "'x'"),
    ):
        with pytest.raises(plugin.RefusedOptionError, match=f"model_args: .*{message}"):
            plugin.MMRecLM.create_from_arg_string(f"device=cpu,{wrong}")


def test_faults_are_a_line_and_an_exit_code(monkeypatch, capsys):
    def call_of_the_harness():
        raise fault("mine")

    with pytest.raises(mmrec.ModelError, match="/absent/config.json: "):
        plugin.MMRecLM.create_from_arg_string("path=/absent")
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", call_of_the_harness)
    for fault, code in plugin._EXIT_CODES.items():
        with pytest.raises(SystemExit, match=str(code)):
            plugin.main()
        assert capsys.readouterr().err == "mmrec.lm_eval: mine\n"


def test_add_bos_token_decides_what_begins_a_context(model):
    tokenizer = mmrec.Tokenizer.load()
    for add_bos in (True, False):
        ((ids, context),) = _mmrec.encode_pairs(tokenizer, [("Once upon", " a time")], add_bos=add_bos)
        assert (int(ids[0]) == tokenizer.bos_id) == add_bos
    assert [len(plugin.MMRecLM(device="cpu", add_bos_token=b)._prompts(["Once upon a"])[0]) for b in (True, False)] == [
        len(tokenizer.encode("Once upon a", add_bos=False)) + extra for extra in (1, 0)
    ]


def test_max_length_keeps_what_hugging_face_keeps(model):
    cut = plugin.MMRecLM(device="cpu", max_length=8)
    tokenizer, session = mmrec.Tokenizer.load(), mmrec.Model.load(device="cpu").new_session()
    ids = np.concatenate([[tokenizer.bos_id], tokenizer.encode(" ".join(TEXTS), add_bos=False)]).astype(np.int32)
    expected = 0.0  # each token once, in windows of eight of which the last is full
    for done in range(0, len(ids) - 1, 8):
        end = min(done + 8, len(ids) - 1)
        session.reset()
        session.prefill(ids[max(0, end - 8) : done + 1])
        expected += float(np.sum(session.score(ids[done + 1 : end + 1]), dtype=np.float64))
    (found,) = cut.loglikelihood_rolling([Request(" ".join(TEXTS))])
    assert found == pytest.approx(expected, rel=1e-5)
    assert found < model.loglikelihood_rolling([Request(" ".join(TEXTS))])[0]
    # The end of a context is what counts.
    ((ids, context),) = _mmrec.encode_pairs(tokenizer, [(TEXTS[0], " She")], True)
    session.reset()
    session.prefill(ids[-9:context])
    (pair,) = cut.loglikelihood([Request(TEXTS[0], " She")])
    assert pair[0] == pytest.approx(float(session.score(ids[context:]).sum()), rel=1e-5)
    long = Request("x" + TEXTS[0], {"max_gen_toks": 5})
    assert cut.generate_until([long]) == cut.generate_until([Request(TEXTS[0], {"max_gen_toks": 5})])
    with pytest.raises(plugin.RefusedOptionError, match="max_length: found 8, expected more than max_gen_toks"):
        cut.generate_until([Request("a", {"max_gen_toks": 8})])
    with pytest.raises(plugin.RefusedOptionError, match="max_length: found 8, expected at least"):
        cut.loglikelihood([Request("a", TEXTS[1])])


def test_the_harness_seed_decides_what_is_drawn(model):
    request = [Request(TEXTS[0], {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20})]

    def drawn(seed):
        np.random.seed(seed)  # as simple_evaluate does
        return model.generate_until(request), model.generate_until(request)

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


def write_task(folder, name, rows, metrics, **task):
    data = folder / f"{name}.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def test_the_harness_itself(tmp_path):
    asked = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    rows = [{"text": text} for text in TEXTS]
    task = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    write_task(tmp_path, "local_ppl", rows, **task, metrics=["word_perplexity", "byte_perplexity", "bits_per_byte"])
    rows = [
        {"q": "Once upon a", "c": [" time", " zebra"], "a": 0},
        {"q": "The dog ran to the", "c": [" of", " park"], "a": 1},
    ]
    task = {"output_type": "multiple_choice", **asked, "doc_to_choice": "{{c}}", "target_delimiter": ""}
    write_task(tmp_path, "local_choice", rows, **task, metrics=["acc", "acc_norm"])
    rows = [{"q": text[:20], "a": "x"} for text in TEXTS]
    task = {"output_type": "generate_until", **asked}
    task["generation_kwargs"] = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    write_task(tmp_path, "local_generate", rows, **task, metrics=["exact_match"])
    command = ["-m", "mmrec.lm_eval", "run", "--model", "mmrec", "--model_args", "device=cpu,threads=1"]
    command += ["--tasks", "local_ppl,local_choice,local_generate", "--include_path", tmp_path]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    refused = python(*command, "--apply_chat_template", **offline)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr and "mmrec.lm_eval: --apply_chat_template: the models" in refused.stderr
    done = python(*command, "--output_path", tmp_path / "out", "--log_samples", **offline)
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results_*.json")]
    figures = result["results"]
    _, summary = summary_of(mmrec.Model.load(device="cpu"), mmrec.Tokenizer.load(), TEXTS)
    assert figures["local_ppl"]["byte_perplexity,none"] == pytest.approx(summary.byte_ppl, rel=1e-6)
    assert figures["local_ppl"]["word_perplexity,none"] == pytest.approx(summary.word_ppl, rel=1e-6)
    assert figures["local_ppl"]["bits_per_byte,none"] == pytest.approx(summary.bits_per_byte, rel=1e-6)
    assert figures["local_choice"]["acc,none"] == 1.0
    assert "exact_match,none" in figures["local_generate"]
