#!/usr/bin/env python3
"""docs/schemas against what they describe: folders of models, and what the programs print and read.

Usage: schemas_test.py GENERATE PPL BENCH     needs python3-jsonschema (scripts/install-deps installs it)
"""
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import jsonschema
except ImportError:  # a Python beside the system's, which has the package
    if sys.executable == "/usr/bin/python3" or not os.access("/usr/bin/python3", os.X_OK):
        sys.exit("python3-jsonschema is missing (scripts/install-deps installs it)")
    os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])

try:
    import referencing
except ImportError:  # jsonschema before 4.18
    referencing = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs/schemas"
TINY = ROOT / "tests/fixtures/tiny"
MODEL = ROOT / "weights/mmrec-12m"
JAX = ROOT / "tests/fixtures/upstream/jax"
PROGRAMS = {pathlib.Path(program).name: str(pathlib.Path(program).resolve()) for program in sys.argv[1:]}
GENERATE, PPL, BENCH = (PROGRAMS[name] for name in ["mmrec-generate", "mmrec-ppl", "mmrec-bench"])
TEXT = "The river runs to the sea.\nIn 1914 the war began.\nA king\n"


def schema(name):
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))


def validator(name):
    if referencing is None:
        known = {"resolver": jsonschema.RefResolver("", schema(name), {"sampler.schema.json": schema("sampler")})}
    else:
        sampler = referencing.Resource.from_contents(schema("sampler"))
        known = {"registry": referencing.Registry().with_resource("sampler.schema.json", sampler)}
    return jsonschema.Draft202012Validator(schema(name), **known)


def run(*command, text=None, cwd=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, (command, done.returncode, done.stderr)
    return done.stdout


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


class SchemasTest(unittest.TestCase):
    def expect_valid(self, name, instances):
        """Each instance is valid, and no longer so without a required member or with one that is unknown."""
        check = validator(name)
        self.assertGreater(len(instances), 0, name)
        for instance in instances:
            errors = [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in check.iter_errors(instance)]
            with self.subTest(schema=name, instance=json.dumps(instance)[:200]):
                self.assertEqual(errors, [])
        if False in (schema(name).get("additionalProperties"), schema(name).get("unevaluatedProperties")):
            self.assertFalse(check.is_valid({**instances[0], "no_such_member": 1}), name)
        for required in schema(name).get("required", []):
            rest = {key: value for key, value in instances[0].items() if key != required}
            self.assertFalse(check.is_valid(rest), (name, required))

    def test_schemas_are_schemas(self):
        names = sorted(path.name for path in SCHEMAS.glob("*.json"))
        self.assertGreater(len(names), 5)
        for name in names:
            with self.subTest(schema=name):
                text = json.loads((SCHEMAS / name).read_text(encoding="utf-8"))
                jsonschema.Draft202012Validator.check_schema(text)
                self.assertEqual(text["$id"], name)

    def test_model_folders(self):
        configs = [p for folder in [ROOT / "tests/fixtures", ROOT / "weights"] for p in folder.rglob("config.json")]
        self.assertGreater(len(configs), 8)
        loaded = [json.loads(p.read_text(encoding="utf-8")) for p in configs]
        self.assertEqual({config["model_type"] for config in loaded}, {"mmrec", "mmrec100m", "mmrec-jax"})
        self.expect_valid("config", loaded)
        defaults = [p for folder in [TINY, MODEL] for p in folder.glob("generation_config.json")]
        self.expect_valid("generation_config", [json.loads(p.read_text(encoding="utf-8")) for p in defaults])

    def test_configurations_that_are_refused(self):
        good = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
        for change in [{"model_type": "llama"}, {"vocab_size": 0}, {"vocab_size": 2**24 + 1}, {"num_layers": 4097},
                       {"model_dim": "32"}, {"use_sparse": True}, {"mdi_mix": 11}, {"bos_token_id": -1},
                       {"eos_token_id": [1, None]}, {"carry_state": 1}]:
            with self.subTest(change=change):
                self.assertFalse(validator("config").is_valid({**good, **change}))
                with tempfile.TemporaryDirectory() as folder:  # and by the programs
                    for file in TINY.iterdir():
                        if file.name != "config.json":
                            os.symlink(file, pathlib.Path(folder, file.name))
                    pathlib.Path(folder, "config.json").write_text(json.dumps({**good, **change}), encoding="utf-8")
                    done = subprocess.run([GENERATE, "-m", folder, "-p", "a", "-n", "1"], capture_output=True)
                    self.assertEqual(done.returncode, 3, done.stderr)
        for change in [{"temperature": -1}, {"top_k": 1.5}, {"top_p": 0}, {"min_p": 2}, {"repetition_penalty": 0},
                       {"do_sample": 1}, {"eos_token_id": "2"}]:
            with self.subTest(change=change):
                self.assertFalse(validator("generation_config").is_valid(change))

    def test_generate(self):
        tiny = [GENERATE, "-q", "--device", "cpu", "-m", TINY, "-n", "3", "--seed", "1"]
        self.expect_valid("mmrec-generate", [
            json.loads(run(GENERATE, "-q", "--device", "cpu", "-p", "Once", "-n", "3", "--seed", "1", "--json")),
            json.loads(run(*tiny, "-p", "a", "--json", "--logprobs", "2")),
            json.loads(run(*tiny, "-p", "a", "--json", "--temp", "0", "--stop", "a"))])
        records = lines(run(*tiny, "--lines", text="ab\nb\n"))
        records += lines(run(*tiny, "--lines", "--logprobs", "2", "--echo", text="ab\nb\n"))
        records += lines(run(*tiny, "-p", "a", "--num-samples", "2", "--logprobs", "1"))
        self.expect_valid("mmrec-generate-record", records)

    def test_requests_and_their_records(self):
        requests = [{"prompt": "ab"}, {"prompt": [1, 5, 6], "id": {"any": ["thing"]}, "n": 2, "seed": 2**64 - 1},
                    {"prompt": "a", "max_tokens": 1, "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
                     "repetition_penalty": 1.1, "stop": ["x", "yz"], "logprobs": 2, "num_samples": 2},
                    {"prompt": "a", "n": None, "stop": "q", "logprobs": True, "seed": None}]
        refused = [{"prompt": 1}, {"prompt": "a", "n": 1.5}, {"prompt": "a", "top_p": 0}, {"prompt": "a", "top_k": -1},
                   {"prompt": "a", "stop": ""}, {"prompt": "a", "stop": [1]}, {"prompt": "a", "logprobs": 1001},
                   {"prompt": "a", "num_samples": 0}, {"prompt": "a", "unknown": 1}, {"prompt": "a", "n": 1, "max_tokens": 1}]
        self.expect_valid("mmrec-generate-request", requests)
        for request in refused:
            self.assertFalse(validator("mmrec-generate-request").is_valid(request), request)
        # The program takes the former and refuses the latter.
        text = "".join(json.dumps(request) + "\n" for request in requests + refused)
        done = subprocess.run([GENERATE, "-q", "--device", "cpu", "-m", TINY, "-n", "2", "--seed", "1", "--jsonl", "-"],
                              input=text, capture_output=True, text=True, timeout=300)
        records = lines(done.stdout)
        self.expect_valid("mmrec-generate-record", records)
        self.assertEqual({r["line"] for r in records if "error" in r}, set(range(len(requests) + 1, len(requests + refused) + 1)))

    def test_ppl(self):
        ppl = [PPL, "-q", "--device", "cpu"]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "text").write_text(TEXT, encoding="utf-8")
            pathlib.Path(folder, "ids").write_text("[1, 5, 7]\n[4]\n", encoding="utf-8")
            pathlib.Path(folder, "pairs").write_text('{"context": "The king", "continuation": " was"}\n', encoding="utf-8")

            def out(*arguments):
                model = () if "-m" in arguments else ("-m", TINY)
                return run(*ppl, *model, *arguments, cwd=folder)

            records = lines(out("--split-by", "line", "--format", "jsonl", "text"))
            pathlib.Path(folder, "part").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
            tokens = out("--split-by", "line", "--per-token", "text")
            pathlib.Path(folder, "tokens").write_text(tokens, encoding="utf-8")
            records += lines(out("--ids", "--format", "jsonl", "ids")) + lines(tokens)
            records += lines(out("-m", JAX, "--ids", "--per-token", "ids")) + lines(out("-m", JAX, "--ids", "--per-doc", "ids"))
            records += lines(out("--mode", "strided", "--window", "8", "--format", "jsonl", "text"))
            records += lines(out("--pairs", "pairs"))
            self.expect_valid("mmrec-ppl-record", records)
            summaries = [run(*ppl, "--format", "json", "text", cwd=folder), out("--format", "json", "--per-doc", "text"),
                         out("--format", "json", "--per-token", "--mode", "rolling", "--window", "8", "text"),
                         out("--ids", "--format", "json", "ids"), out("-m", JAX, "--ids", "--format", "json", "ids"),
                         out("--split-by", "line", "--format", "json", "--compare", "tokens", "text"),
                         out("--split-by", "line", "--format", "json", "--shard", "1/2", "text"),
                         run(PPL, "merge", "--format", "json", "part", cwd=folder)]
            self.expect_valid("mmrec-ppl", [json.loads(text) for text in summaries])
            self.expect_valid("mmrec-ppl-pairs", [json.loads(out("--pairs", "--format", "json", "pairs"))])

    def test_bench(self):
        report = json.loads(run(BENCH, "--device", "cpu", "-m", TINY, "--lengths", "16", "--batches", "1", "--decode", "4",
                                "--documents", "2", "--requests", "2", "--slots", "2", "--offline", "2", "--repeat", "1",
                                "--json"))
        gpu = copy.deepcopy(report)  # what a GPU's report has instead: the machine's figures, the shares' names
        gpu["machine"] = {"device": "NVIDIA H200", "copy_gb_per_s": 1.0, "read_gb_per_s": 1.0, "product_gflop_per_s": 1.0}
        del gpu["peak_memory_limit_bytes"]
        gpu["compare"] = {key: value for key, value in report.items() if key != "schema"}
        gpu["speedups"] = [{"phase": "decode", "batch": 1, "tokens": 4, "factor": 2.0}]
        self.expect_valid("mmrec-bench", [report, gpu])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
