#!/usr/bin/env python3
"""weights/convert.py on checkpoints of Flax: all their forms convert, and a damaged file costs one line and little memory."""
import os
import pickle
import resource
import shutil
import struct
import sys
import time
import unittest
import zipfile

sys.dont_write_bytecode = True

from checkpoints import UPSTREAM, ConvertCase, Packed, array, ext, pack, pack_pairs  # noqa: E402
from checkpoints import read_safetensors, stored, tree_of, with_values  # noqa: E402

from conversion import flax, mmrec_jax  # noqa: E402

SIZES = {"vocab_size": 5, "model_dim": 4, "num_layers": 1}
CHUNKED = "__msgpack_chunked_array__"


def tiny_jax(fused=lambda layer: True, **sizes):
    return with_values(mmrec_jax.tensor_specs({**SIZES, **sizes}, fused))


def arrays(model):
    return {name: array(shape, values) for name, (shape, values) in model.items()}


def training_state(params):
    """As TrainState.create makes one: params are packed."""
    count = ext(1, pack([[], "int32", b"\2\0\0\0"]))
    moments = {"count": count, "mu": params, "nu": params}
    return pack({"step": count, "params": params,
                 "opt_state": {"0": {}, "1": {"0": moments, "1": {}, "2": {"count": ext(3, pack([[], "int32", bytes(4)]))}}}})


class JaxCase(ConvertCase):
    def save_tree(self, tree, name="model.msgpack"):
        path = self.folder / name
        path.write_bytes(tree if isinstance(tree, bytes) else pack(tree))
        return path

    def save_arrays(self, entries):
        return self.save_tree(tree_of(entries))

    def expect_tiny(self, converted, model=None):
        model = tiny_jax() if model is None else model
        self.assertEqual(converted, stored(model))
        config = self.config()
        shutil.rmtree(self.out)
        return config

    def refuse(self, tree, *parts, arguments=("--num-heads", 1)):
        self.assert_refused(self.save_tree(tree), "model.msgpack", *parts, arguments=arguments)


class FixtureTest(JaxCase):
    settings = UPSTREAM / "jax/config.json"

    @staticmethod
    def is_planning(name):
        return ".W_planning_" in name

    def test_parameters_of_the_public_code(self):
        converted = self.convert(UPSTREAM / "jax/job_model.msgpack", "--config", self.settings)
        self.expect_fixture(converted, "jax", self.is_planning)
        self.assertEqual(self.config(), {"model_type": "mmrec-jax", "vocab_size": 160, "model_dim": 32, "num_layers": 3,
                                         "num_heads": 2, "long_mem_len": 40, "bank": True, "calls": "prompt"})

    def test_training_state_with_these_parameters(self):
        state = training_state(Packed((UPSTREAM / "jax/job_model.msgpack").read_bytes()))
        self.assertEqual(state[:30].hex(), "83a473746570c70e019390a5696e743332c40402000000a6706172616d73")  # the public code's
        converted = self.convert(self.save_tree(state), "--config", self.settings, "--bank", "false", "--calls", "stepwise")
        self.expect_fixture(converted, "jax", self.is_planning)
        config = self.config()
        self.assertEqual((config["bank"], config["calls"]), (False, "stepwise"))


class FormsTest(JaxCase):
    arguments = ("--num-heads", 2)

    def test_what_is_written_beside_the_tensors(self):
        config = self.expect_tiny(self.convert(self.save_arrays(arrays(tiny_jax())), *self.arguments))
        self.assertEqual(config, {"model_type": "mmrec-jax", **SIZES, "num_heads": 2, "long_mem_len": 512, "bank": True,
                                  "calls": "prompt"})
        file = self.folder / "run.json"
        file.write_text('{"job_name": "x", "num_heads": 4, "ffn_dim": 7, "use_moe": false, "long_mem_len": 16, "bank": false, '
                        '"calls": "whole", "eos_token_id": 3, "vocab_size": 5, "learning_rate": 3e-4}')
        config = self.expect_tiny(self.convert(self.save_arrays(arrays(tiny_jax())), "--config", file))
        self.assertEqual(config, {"model_type": "mmrec-jax", **SIZES, "num_heads": 4, "long_mem_len": 16, "bank": False,
                                  "calls": "whole", "eos_token_id": 3})
        config = self.expect_tiny(self.convert(self.save_arrays(arrays(tiny_jax())), "--config", file, "--bank", "true",
                                               "--calls", "prompt", "--num-heads", 1))
        self.assertEqual((config["bank"], config["calls"], config["num_heads"]), (True, "prompt", 1))

    def test_training_states_and_variables(self):
        params = Packed(pack(tree_of(arrays(tiny_jax()))))
        for tree in (training_state(params), {"params": params}, {"params": {"params": params}},
                     {"opt_state": None, "params": {"params": params}, "step": 3}):
            self.expect_tiny(self.convert(self.save_tree(tree), *self.arguments))

    def test_separate_projections(self):
        model = tiny_jax(lambda layer: layer == 1, num_layers=2)
        self.assertIn("block_0.W_q.kernel", model)
        self.assertIn("block_1.W_fused.kernel", model)
        self.expect_tiny(self.convert(self.save_arrays(arrays(model)), *self.arguments), model)

    def test_arrays_in_chunks_and_in_any_order(self):
        entries = arrays(tiny_jax())
        shape, values = tiny_jax()["shared_embed.embedding"]
        chunks = {str(i): array([len(values[at:at + 7])], values[at:at + 7]) for i, at in enumerate(range(0, len(values), 7))}
        entries["shared_embed.embedding"] = whole = Packed(pack({CHUNKED: True, "shape": {"0": 5, "1": 4}, "chunks": chunks}))
        self.expect_tiny(self.convert(self.save_arrays(entries), *self.arguments))
        entries["shared_embed.embedding"] = Packed(pack(
            {"chunks": dict(reversed(chunks.items())), "shape": {"1": 4, "0": 5}, CHUNKED: True}))
        self.expect_tiny(self.convert(self.save_tree(tree_of(dict(reversed(entries.items())))), *self.arguments))
        self.expect_tiny(self.convert(self.save_tree(training_state(Packed(pack(tree_of({**entries, "shared_embed.embedding":
                                                                                       whole}))))), *self.arguments))

    def test_wide_forms_of_lengths(self):
        shape, values = tiny_jax()["norm_final.scale"]
        data = struct.pack("<4f", *values)
        text = b"\xdb\0\0\0\7float32"
        entries = arrays(tiny_jax())
        for shape_form in (b"\xdd\0\0\0\1\xcf" + bytes(7) + b"\4", b"\xdc\0\1\xd0\4", b"\x91\xce\0\0\0\4"):
            for data_form in (b"\xc6\0\0\0\x10", b"\xc5\0\x10", b"\xc4\x10"):
                payload = b"\x93" + shape_form + text + data_form + data
                for form in (b"\xc9" + struct.pack(">I", len(payload)), b"\xc8" + struct.pack(">H", len(payload))):
                    entries["norm_final.scale"] = Packed(form + b"\1" + payload)
                    path = self.save_tree(b"\xdf" + struct.pack(">I", 3) + pack(tree_of(entries))[1:])
                    code, stderr = self.convert_here(path, *self.arguments)
                    self.assertEqual(code, 0, stderr)

    def test_types_stay_or_become_one(self):
        model = tiny_jax()
        entries = arrays(model)
        bits = {"float16": lambda v: struct.pack("<e", v), "bfloat16": lambda v: struct.pack("<f", v)[2:]}
        for name, dtype in (("norm_final.scale", "float16"), ("block_0.norm1.scale", "bfloat16")):
            entries[name] = array(model[name][0], b"".join(map(bits[dtype], model[name][1])), dtype)
        path = self.save_arrays(entries)
        done = self.run_script(path, "-o", self.out, *self.arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        converted = read_safetensors(self.out / "model.safetensors")
        self.assertEqual(converted["norm_final.scale"], ("F16", [4], b"".join(map(bits["float16"], model["norm_final.scale"][1]))))
        self.assertEqual(converted["block_0.norm1.scale"][0], "BF16")
        self.out = self.folder / "bf16"
        converted = self.convert(path, *self.arguments, "--dtype", "bf16", "--max-shard-size", "100MB")
        self.assertEqual({entry[0] for entry in converted.values()}, {"BF16"})

    def test_planning_is_left_out(self):
        entries = {**arrays(tiny_jax()), "block_0.W_planning_error.kernel": array([2, 2], [1.0] * 4),
                   "block_0.W_planning_target.bias": array([2], [1.0] * 2)}
        self.expect_tiny(self.convert(self.save_arrays(entries), *self.arguments))


class RefusalsTest(JaxCase):
    def test_files_that_are_something_else(self):
        self.refuse(pickle.dumps({"params": 1}, protocol=2), "found a pickle", "80 02", "expected a msgpack map")
        archive = self.folder / "z.msgpack"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a/data.pkl", "x")
        self.assert_refused(archive, "found a zip archive", "PyTorch")
        archive.unlink()
        for data, part in ((b"", "empty file"), (b"\x80", "0x80"), (b"MMRC\1\0\0\0", "C++ line"), (b"\x93\1\2\3", "0x93"),
                           (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"), (b" <!DOCTYPE html>", "web page"),
                           (b"\x20\0\0\0\0\0\0\0{}", "safetensors"), (b"\xa6params", "0xa6")):
            self.refuse(data, part)

    def test_names_decide_and_hints_help(self):
        path = self.save_tree(tree_of(arrays(tiny_jax())), "model.pt")
        self.assert_refused(path, "no zip archive", "ends in .msgpack")
        path.write_bytes(b"MMRC" + bytes(100))
        self.assert_refused(path, "MMRC", "blocks were never saved")
        path.unlink()
        self.convert(self.save_tree(tree_of(arrays(tiny_jax())), "MODEL.MSGPACK"), "--num-heads", 1)

    def test_mixture_of_experts(self):
        entries = {k: v for k, v in arrays(tiny_jax()).items() if "ffn_dense" not in k}
        entries["block_0.moe_ffn.router.hash_proj.kernel"] = array([4, 8], [0.0] * 32)
        self.refuse(tree_of(entries), "use_moe", "block_0.moe_ffn.router.hash_proj.kernel")
        file = self.folder / "run.json"
        file.write_text('{"use_moe": true, "num_heads": 1}')
        self.refuse(tree_of(arrays(tiny_jax())), "use_moe", arguments=["--config", file])

    def test_tensors_that_are_missing_misshapen_or_unknown(self):
        for name in ("block_0.norm_recurrence.scale", "shared_embed.embedding", "norm_final.scale", "block_0.W_fused.bias",
                     "block_0.attn.q_proj.kernel", "block_0.ffn_dense2.kernel"):
            self.refuse(tree_of({k: v for k, v in arrays(tiny_jax()).items() if k != name}), name, "missing")
        entries = arrays(tiny_jax())
        self.refuse(tree_of({**entries, "block_0.ffn_dense1.kernel": array([16, 4], [0.0] * 64)}), "[16, 4]", "[4, 16]")
        self.refuse(tree_of({**entries, "norm_final.scale": array([], [0.0])}), "norm_final.scale", "[]", "[4]")
        self.refuse(tree_of({**entries, "norm_final.scale": ext(3, pack([[], "float32", bytes(4)]))}), "norm_final.scale", "[4]")
        for name in ("block_0.attn.q_proj.bias", "block_0.W_q.bias", "lm_head.kernel", "block_0.norm3.scale"):
            self.refuse(tree_of({**entries, name: array([1], [0.0])}), name, "does not have")
        self.refuse(tree_of({k.replace("block_0", "block_1"): v for k, v in entries.items()}), "block_N", "[1]")
        self.refuse(tree_of(arrays(tiny_jax(model_dim=6))), "6 columns", "multiple of 4")
        self.refuse({"step": 1, "opt_state": {}}, "opt_state", "expected params")

    def test_settings(self):
        file = self.folder / "run.json"
        tree = tree_of(arrays(tiny_jax()))
        self.refuse(tree, "num_heads", "--config FILE.json", arguments=())
        for text, part in (('{}', "num_heads"), ('{"num_heads": 3}', "divisor"), ('{"num_heads": 1.0}', "num_heads"),
                           ('{"num_heads": 1, "model_dim": 8}', "model_dim"), ('{"num_heads": 1, "num_layers": 2}', "num_layers"),
                           ('{"num_heads": 1, "model_type": "mmrec"}', "model_type"), ('{"num_heads": 1, "bank": 1}', "bank"),
                           ('{"num_heads": 1, "calls": "all"}', "calls"), ('{"num_heads": 1, "long_mem_len": 0}', "long_mem_len"),
                           ('{"num_heads": 1, "long_mem_len": true}', "long_mem_len"),
                           ('{"num_heads": 1, "long_mem_len": 99999999999}', "long_mem_len"), ('[1]', "JSON object")):
            file.write_text(text)
            self.refuse(tree, part, arguments=["--config", file])
        self.refuse(tree, "--expert", "mmrec-jax", arguments=["--num-heads", 1, "--expert", "both"])
        for arguments in (["--bank", "yes"], ["--calls", "none"]):
            self.assertEqual(self.run_script(self.save_tree(tree), "-o", self.out, *arguments).returncode, 2)

    def test_types_that_are_no_weights(self):
        for dtype, size in (("float64", 8), ("int32", 4), ("bool", 1), ("complex64", 8), ("float8_e4m3fn", 1), ("O", 8),
                            ("", 4), ("float32\0", 4), ("\x1b[2J", 4)):
            shown = dtype.encode("unicode_escape").decode()
            self.refuse(tree_of({**arrays(tiny_jax()), "norm_final.scale": array([4], bytes(4 * size), dtype)}),
                        "norm_final.scale", shown, "expected float32, float16 or bfloat16")


class DamageTest(JaxCase):
    def with_scale(self, value):
        return tree_of({**arrays(tiny_jax()), "norm_final.scale": value})

    def test_arrays_that_contradict_themselves(self):
        good = ([4], "float32", bytes(16))
        for parts, text in (((([5],) + good[1:]), "found 16 bytes, expected 20"), (([4], "float16", bytes(16)), "expected 8"),
                            (([1 << 62, 1 << 62], "float32", bytes(16)), "found 16 bytes"),
                            (([1 << 31] * 3, "float32", bytes(16)), "found 16 bytes"),
                            (([1 << 63], "float32", b""), "extent"), (([-4], "float32", bytes(16)), "extent -4"),
                            (([1] * 9, "float32", bytes(4)), "9 dimensions"), ((4, "float32", bytes(16)), "expected an array"),
                            (([4.0], "float32", bytes(16)), "a float"), (([4], 7, bytes(16)), "expected a string"),
                            (([4], "float32", "x" * 16), "expected bytes"), (([4], "float32"), "found 2 parts"),
                            (([4], "f" * 33, bytes(16)), "33 bytes"), ((([True]), "float32", bytes(4)), "a boolean"),
                            (([4], "float32", bytes(16), 1), "found 4 parts")):
            with self.subTest(parts=parts):
                self.refuse(self.with_scale(ext(1, pack(list(parts)))), "norm_final.scale", text)
        self.refuse(self.with_scale(ext(1, pack(list(good)) + b"\0")), "1 bytes after the data")
        self.refuse(self.with_scale(ext(1, pack(list(good))[:-1])), "cut short or damaged")
        self.refuse(self.with_scale(ext(1, b"")), "cut short or damaged")
        self.refuse(self.with_scale(ext(2, pack(list(good)))), "an ext value 2")
        self.refuse(self.with_scale(ext(255, pack(list(good)))), "an ext value -1")
        for value, kind in ((None, "nil"), (1, "an integer"), (1.5, "a float"), ([1], "an array"), ("x", "a string"), (b"x", "bytes")):
            self.refuse(self.with_scale(value), "norm_final.scale", f"found {kind}")

    def test_chunks_that_contradict_themselves(self):
        one = array([2], [0.0] * 2)
        for tree, part in (({CHUNKED: True, "shape": {"0": 5}, "chunks": {"0": one, "1": one}}, "found 4 elements"),
                           ({CHUNKED: True, "shape": {"0": 1 << 62, "1": 1 << 62}, "chunks": {"0": one}}, "found 2 elements"),
                           ({CHUNKED: False, "shape": {"0": 2}, "chunks": {"0": one}}, "expected true"),
                           ({CHUNKED: True, "shape": {"0": 2}}, "keys"), ({CHUNKED: True, "shape": {"0": 0}, "chunks": {}}, "0 types"),
                           ({CHUNKED: True, "shape": {"1": 2}, "chunks": {"0": one}}, "expected 0, 1, 2"),
                           ({CHUNKED: True, "shape": {"0": 4}, "chunks": {"0": one, "01": one}}, "expected 0, 1, 2"),
                           ({CHUNKED: True, "shape": {"0": 4}, "chunks": {"0": one, "1": array([2], bytes(4), "float16")}}, "2 types"),
                           ({CHUNKED: True, "shape": {str(i): 1 for i in range(9)}, "chunks": {"0": one}}, "9 dimensions"),
                           ({CHUNKED: True, "shape": [2], "chunks": {"0": one}}, "expected a map"),
                           ({CHUNKED: True, "shape": {"0": 2}, "chunks": {"0": {CHUNKED: True}}}, "expected an array of numbers")):
            self.refuse(self.with_scale(tree), "norm_final", part)

    def test_keys(self):
        pairs = list(tree_of(arrays(tiny_jax())).items())
        self.refuse(pack_pairs(pairs + pairs[:1]), "twice")
        self.refuse(pack_pairs([("params", {}), ("params", {})]), "twice")
        self.refuse({**tree_of(arrays(tiny_jax())), "norm_final.scale": array([4], bytes(16))}, "second tensor")
        self.refuse(pack_pairs([(1, 2)]), "key", "expected a string")
        self.refuse(pack_pairs([(Packed(b"\xa1\xff"), 2)]), "UTF-8")
        self.refuse(pack_pairs([("x" * 513, 2)]), "513 bytes")
        self.refuse(pack(tree_of(arrays(tiny_jax()))) + b"\0", "1 bytes after the map")
        self.refuse({"a\x1b[2J\n": 1}, "a\\x1b[2J")

    def test_nesting(self):
        tree = {"a": array([1], [0.0])}
        for _ in range(9):
            tree = {"a": tree}
        self.refuse(tree, "levels of parameters")
        for opening in (b"\x91", b"\x81\xa1a", b"\x82\xa1b"):
            for closed in (b"", b"\0" * 1_000_000):
                self.refuse(b"\x82\xa6params\x80\xa9opt_state" + opening * 1_000_000 + closed, "more than 64 levels")
                self.refuse(b"\x81\xa1a" + opening * 1_000_000 + closed, "more than 64 levels")

    def test_cut_short_at_any_byte(self):
        for tree in (tree_of(arrays(tiny_jax())), Packed(training_state(Packed(pack({"norm_final": {"scale": array([4], bytes(16))}}))))):
            data = pack(tree)
            for n in range(len(data)):
                self.refuse(data[:n])


class MemoryTest(JaxCase):
    """Under a limit of address space that a list of a file's values, or a buffer of a length it claims, would exceed."""
    limit = 512 << 20

    def run_limited(self, path):
        start = time.monotonic()
        done = self.run_script(path, "-o", self.out, "--num-heads", 1,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (self.limit, self.limit)))
        self.assertLess(time.monotonic() - start, 60)
        self.assertNotIn("Traceback", done.stderr)
        return done

    def test_lengths_that_are_claimed(self):
        huge = b"\xff\xff\xff\xff"
        for claim in (b"\xdf" + huge, b"\xdd" + huge, b"\xc6" + huge, b"\xdb" + huge, b"\xc9" + huge + b"\1",
                      ext(1, b"\x93\xdd" + huge), ext(1, b"\x93\x91\4\xdb" + huge), ext(1, b"\x93\x91\4\xa7float32\xc6" + huge)):
            for data in (b"\x81\xa1a" + claim, b"\x82\xa6params\x80\xa9opt_state" + claim, b"\x81\xa6params\x81\xa1a" + claim):
                done = self.run_limited(self.save_tree(data))
                self.assertEqual(done.returncode, 3, done.stderr)
        self.assertEqual(self.run_limited(self.save_tree(b"\xdf" + huge + b"\xa1a\0" * 1000)).returncode, 3)

    def test_what_is_passed_over_is_not_read(self):
        params = pack(tree_of(arrays(tiny_jax())))
        path = self.save_tree(b"\x82\xa6params" + params + b"\xa9opt_state\xc6" + struct.pack(">I", 1 << 30))
        os.truncate(path, path.stat().st_size + (1 << 30))  # a hole
        done = self.run_limited(path)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_many_values_are_passed_over_one_by_one(self):
        params, count = pack(tree_of(arrays(tiny_jax()))), 1_000_000
        path = self.save_tree(b"\x82\xa6params" + params + b"\xa9opt_state\xdd" + struct.pack(">I", count) + b"\x90" * count)
        done = self.run_limited(path)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_many_parameters_are_refused(self):
        count = flax.MAX_ENTRIES + 1
        entries = b"".join(b"\xa6%06d\0" % i for i in range(count))
        done = self.run_limited(self.save_tree(b"\x81\xa6params\xdf" + struct.pack(">I", count) + entries))
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn(f"more than {flax.MAX_ENTRIES} entries", done.stderr)


if __name__ == "__main__":
    unittest.main()
