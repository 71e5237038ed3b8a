#!/usr/bin/env python3
"""weights/convert.py: it converts what PyTorch saves, runs nothing that a checkpoint brings along, and leaves no half folder.

Long, because it crafts a checkpoint for each way in which one can be wrong."""
import base64
import collections
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest
import zipfile
from unittest import mock

sys.dont_write_bytecode = True

from checkpoints import CONFIG, SCRIPT, UPSTREAM, ConvertCase, Raw, call, name, op, read_safetensors, state_and_storages  # noqa: E402
from checkpoints import stored, tensor, tiny_model  # noqa: E402

from conversion import dtypes, tokenizer  # noqa: E402
from conversion.common import Rejected  # noqa: E402
from conversion.pytorch import LEGACY_MAGIC, Archive  # noqa: E402


VOCAB = CONFIG["vocab_size"]


def sentencepiece(pieces):
    """A ModelProto of so many pieces without a score, and what a trainer says of itself."""
    return b"".join(b"\x0a\x04\x0a\x02%02x" % (i % 256) for i in range(pieces)) + b"\x12\x02\x18\x01"


def ranks(count):
    return b"".join(b"%s %d\n" % (base64.b64encode(i.to_bytes(3, "big")), i) for i in range(count))


class FixturesTest(ConvertCase):
    def test_training_checkpoint_gives_the_same_tensors(self):
        converted = self.convert(UPSTREAM / "mdi/checkpoint.pt")
        self.assertEqual(converted, read_safetensors(UPSTREAM / "mdi/model.safetensors"))
        config, expected = self.config(), json.loads((UPSTREAM / "mdi/config.json").read_text())
        self.assertEqual({key: config[key] for key in expected}, expected)

    def test_mixed_state_dict_gives_the_same_numbers(self):
        converted = self.convert(UPSTREAM / "hem/state_dict_mixed.pt", "--num-heads", 3)
        expected = read_safetensors(UPSTREAM / "hem/model.safetensors")
        self.assertEqual(set(converted), set(expected))
        self.assertEqual({entry[0] for entry in converted.values()}, {"F32", "F16", "BF16"})
        for tensor_name, entry in converted.items():
            if entry[0] == "F32":
                self.assertEqual(entry, expected[tensor_name], tensor_name)
            else:  # what the fixture holds in fp32, rounded to this type
                rounded = dtypes.from_f32(expected[tensor_name][2], entry[0], tensor_name)
                self.assertEqual(entry[2], rounded, tensor_name)
        config = self.config()
        self.assertEqual((config["use_hem"], config["num_heads"], config["ffn_dim"]), (True, 3, 160))

    def test_one_type_for_all(self):
        for dtype in ("f32", "bf16", "f16"):
            with self.subTest(dtype=dtype):
                self.out = self.folder / dtype
                converted = self.convert(UPSTREAM / "hem/state_dict_mixed.pt", "--num-heads", 3, "--dtype", dtype)
                self.assertEqual({entry[0] for entry in converted.values()}, {dtype.upper()})

    def test_configuration_from_a_file(self):
        self.convert(UPSTREAM / "mdi/checkpoint.pt", "--config", UPSTREAM / "mdi/config.json")
        self.assertEqual(self.config()["num_heads"], 4)

    def test_format_from_before_1_6_is_refused_with_the_remedy(self):
        """The fixture is the beginning of a file of torch.save: all its pickles and the first numbers."""
        self.assert_refused(UPSTREAM / "mdi/checkpoint_legacy.pt", "before 1.6", "torch.save(torch.load(")

    def test_number_of_heads_is_asked_for(self):
        self.assert_refused(UPSTREAM / "hem/state_dict_mixed.pt", "num_heads", "--num-heads N")


class LayoutsTest(ConvertCase):
    def expect_tiny(self, converted, model=None):
        model = tiny_model() if model is None else model
        self.assertEqual(converted, stored(model))

    def test_wrappers_and_prefixes(self):
        for wrap in (lambda s: {"model_state_dict": s, "config": {"num_heads": 2}, "epoch": 3, "loss": 0.5, "x": [1, (2,)]},
                     lambda s: {"state_dict": s, "model_config": {"num_heads": 2, "unknown": "kept out"}},
                     lambda s: {"model": {"module._orig_mod." + k: v for k, v in s.items()}, "config": {"num_heads": 2}}):
            self.expect_tiny(self.convert(self.save_model(wrap=wrap)))
            self.assertNotIn("unknown", self.config())
            shutil.rmtree(self.out)

    def test_bare_state_dict_of_parameters_with_metadata(self):
        state, storages = state_and_storages(tiny_model())
        parameters = {k: call(name("torch._utils", "_rebuild_parameter"), v, True, call(name("collections", "OrderedDict")))
                      for k, v in state.items()}
        ordered = Raw(call(name("collections", "OrderedDict")) + b"(" + b"".join(op(k) + op(v) for k, v in parameters.items())
                      + b"u" + op({"_metadata": call(name("collections", "OrderedDict"))}) + b"b")
        self.expect_tiny(self.convert(self.save(ordered, storages), "--num-heads", 2))

    def test_shared_storage_with_offsets(self):
        state, flat = {}, []
        for tensor_name, (shape, values) in tiny_model().items():
            state[tensor_name] = (shape, len(flat))
            flat += values
        state = {k: tensor("0", shape, len(flat), offset) for k, (shape, offset) in state.items()}
        data = struct.pack(f"<{len(flat)}f", *flat)
        self.expect_tiny(self.convert(self.save(state, {"0": data}), "--num-heads", 1))

    def test_strides(self):
        state, storages = {}, {}
        for i, (tensor_name, (shape, values)) in enumerate(tiny_model().items()):
            key = str(i)
            if len(shape) == 2:  # stored column by column
                rows, cols = shape
                values = [values[r * cols + c] for c in range(cols) for r in range(rows)]
                state[tensor_name] = tensor(key, shape, stride=(1, rows))
            else:  # every third element, from the second on
                values = [x for v in values for x in (-1.0, v, -2.0)]
                state[tensor_name] = tensor(key, shape, elements=len(values), offset=1, stride=(3,))
            storages[key] = struct.pack(f"<{len(values)}f", *values)
        self.expect_tiny(self.convert(self.save(state, storages), "--num-heads", 8))

    def test_tied_head_by_storage(self):
        state, storages = state_and_storages(tiny_model())
        state["lm_head.weight"] = state["embedding.weight"]
        model = tiny_model()
        model["lm_head.weight"] = model["embedding.weight"]
        self.expect_tiny(self.convert(self.save(state, storages), "--num-heads", 1), model)

    def test_dpg_and_hem(self):
        model = tiny_model(use_hem=True, use_dpg=True, dpg_rank=3)
        self.expect_tiny(self.convert(self.save_model(model)), model)
        config = self.config()
        self.assertEqual((config["use_hem"], config["use_dpg"], config["dpg_rank"]), (True, True, 3))

    def test_tensors_that_inference_does_not_use_are_left_out(self):
        state, storages = state_and_storages(tiny_model())
        state["blocks.0.mdi.W_planning_gate.weight"] = tensor("0", (2, 2), 48)
        state["steps"] = tensor("99", (3,), kind="LongStorage")
        state["scale"] = tensor("98", (3,), kind="DoubleStorage")
        path = self.save(state, storages)
        done = self.run_script(path, "-o", self.out, "--num-heads", 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("3 tensors that inference does not use", done.stderr)
        self.expect_tiny(read_safetensors(self.out / "model.safetensors"))

    def test_shards_with_an_index(self):
        self.convert(self.save_model(), "--max-shard-size", "1KB")
        index = json.loads((self.out / "model.safetensors.index.json").read_text())
        together = {}
        for shard in sorted(set(index["weight_map"].values())):
            tensors = read_safetensors(self.out / shard)
            self.assertEqual({k for k, v in index["weight_map"].items() if v == shard}, set(tensors))
            self.assertTrue(len(tensors) == 1 or sum(len(t[2]) for t in tensors.values()) <= 1000)
            together.update(tensors)
        self.expect_tiny(together)
        self.assertEqual(index["metadata"]["total_size"], sum(len(t[2]) for t in together.values()))

    def test_tokenizer_is_copied(self):
        tokens = sentencepiece(VOCAB)
        (self.folder / "t").write_bytes(tokens)
        self.convert(self.save_model(), "--tokenizer", self.folder / "t")
        self.assertEqual((self.out / "tokenizer.model").read_bytes(), tokens)
        self.assertEqual(sorted(os.listdir(self.out)), ["config.json", "model.safetensors", "tokenizer.model"])

    def test_tokenizers_of_other_models_are_refused(self):
        path = self.save_model()
        for data, part in ((sentencepiece(VOCAB + 1), f"found {VOCAB + 1} tokens, expected at most the {VOCAB} rows"),
                           (ranks(VOCAB + 1), f"found {VOCAB + 1} tokens"), (b"\x00tokens", "neither a sentencepiece model"),
                           (sentencepiece(VOCAB)[:-1], "neither"), (b"", "neither"), (b"YQ== one\n", "neither"),
                           (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "neither"),
                           (ranks(VOCAB), "tokenizer_config.json with their pattern")):
            with self.subTest(part=part):
                (self.folder / "t").write_bytes(data)
                self.assert_refused(path, part, arguments=["--tokenizer", self.folder / "t"])

    def test_a_rank_file_brings_its_configuration_along(self):
        (self.folder / "t.tiktoken").write_bytes(ranks(VOCAB))
        (self.folder / "tokenizer_config.json").write_text('{"pattern": "."}')
        self.convert(self.save_model(), "--tokenizer", self.folder / "t.tiktoken")
        self.assertEqual((self.out / "tokenizer.tiktoken").read_bytes(), ranks(VOCAB))
        self.assertEqual(json.loads((self.out / "tokenizer_config.json").read_text()), {"pattern": "."})

    def test_that_of_cl100k_base_is_known(self):
        file = self.folder / "cl100k_base.tiktoken"
        file.write_bytes(ranks(100256))
        files = tokenizer.read_tokenizer(str(file), 100260)
        self.assertEqual(sorted(files), ["tokenizer.tiktoken", "tokenizer_config.json"])
        config = json.loads(files["tokenizer_config.json"])
        self.assertEqual(config["special_tokens"], {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259})
        documented = (SCRIPT.parents[1] / "docs/file-formats.md").read_text().split("```json\n")[1].split("```")[0]
        self.assertEqual(config["pattern"], json.loads(documented)["pattern"])

    def test_an_empty_folder_is_taken(self):
        self.out.mkdir()
        self.expect_tiny(self.convert(self.save_model()))


class NumbersTest(unittest.TestCase):
    def test_rounding_to_bf16_is_to_nearest_even(self):
        for bits, expected in ((0x3F800000, 0x3F80), (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81),
                               (0x80000000, 0x8000), (0x00000001, 0x0000), (0x7F800000, 0x7F80), (0xFF800000, 0xFF80),
                               (0x7F7F7FFF, 0x7F7F)):
            data = dtypes.from_f32(struct.pack("<I", bits), "BF16", "t")
            self.assertEqual(struct.unpack("<H", data)[0], expected, hex(bits))
        nan = struct.unpack("<H", dtypes.from_f32(struct.pack("<I", 0x7F800001), "BF16", "t"))[0]
        self.assertEqual(nan & 0x7F80, 0x7F80)
        self.assertNotEqual(nan & 0x7F, 0)

    def test_overflow_is_refused_by_tensor_and_index(self):
        with self.assertRaisesRegex(Rejected, "t: element 1 .*BF16"):
            dtypes.from_f32(struct.pack("<ff", 1.0, 3.4028e38), "BF16", "t")
        with self.assertRaisesRegex(Rejected, "t: element 2 .*F16"):
            dtypes.from_f32(struct.pack("<fff", 1.0, 65519.0, 65520.0), "F16", "t")
        self.assertEqual(dtypes.from_f32(struct.pack("<f", float("inf")), "F16", "t"), b"\x00\x7c")

    def test_widening_is_exact(self):
        every = struct.pack("<65536H", *range(65536))
        wide = struct.unpack("<65536I", dtypes.to_f32(every, "BF16"))
        self.assertEqual(wide, tuple(h << 16 for h in range(65536)))
        halves = struct.unpack("<65536f", dtypes.to_f32(every, "F16"))
        self.assertEqual(halves[0x3C00], 1.0)
        self.assertEqual(halves[0x0001], 2.0**-24)
        self.assertEqual(halves[0xFBFF], -65504.0)


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class MaliciousTest(ConvertCase):
    def test_nothing_in_a_checkpoint_runs(self):
        witness = self.folder / "ran"
        payloads = {
            "posix.system": Evil(os.system, f"touch {witness}"),
            "builtins.eval": Evil(eval, f"open({str(witness)!r}, 'w')"),
            "builtins.exec": Evil(exec, f"open({str(witness)!r}, 'w')"),
            "subprocess.check_output": Evil(subprocess.check_output, ["touch", str(witness)]),
            "builtins.getattr": Evil(getattr, "x", "y"),
        }
        for protocol in (0, 1, 2, 3, 4, 5):
            for names, payload in payloads.items():
                with self.subTest(protocol=protocol, payload=names):
                    data = pickle.dumps({"model_state_dict": {}, "x": payload}, protocol=protocol)
                    self.assert_refused(self.save(data), *([names.split(".")[1]] if protocol in (2, 4) else []))
        self.assertFalse(witness.exists())

    def test_the_payloads_would_run(self):
        witness = self.folder / "ran"
        pickle.loads(pickle.dumps(Evil(os.system, f"touch {witness}")))
        self.assertTrue(witness.exists(), "the test above would prove nothing")

    def test_a_name_is_never_imported(self):
        for module, attribute in (("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "FloatStorage2"),
                                  ("torch._utils", "_rebuild_tensor"), ("torch.storage", "_load_from_bytes"),
                                  ("collections", "OrderedDict.fromkeys"), ("collections.OrderedDict", "x"),
                                  ("__main__", "Evil"), ("antigravity", "x")):
            path = self.save({"a": call(name(module, attribute), "x")})
            self.assert_refused(path, f"needs {module}.{attribute}", "not loaded")

    def test_a_storage_class_cannot_be_called(self):
        self.assert_refused(self.save({"a": call(name("torch", "FloatStorage"), 1)}), "calls torch.FloatStorage")

    def test_opcodes_that_make_objects_are_refused(self):
        for code in (b"\x81", b"\x92", b"i", b"o", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"P1\n", b"\x97", b"\x98"):
            self.assert_refused(self.save(b"\x80\x02" + code + b"."), "pickle opcode")

    def test_malformed_pickles(self):
        for data in (b"", b".", b"\x80", b"\x80\x02", b"\x80\x02}", b"\x80\x02}}.", b"\x80\x02(.", b"\x80\x02t.", b"\x80\x02R.",
                     b"\x80\x02NNR.", b"\x80\x02h\x00.", b"\x80\x02j\xff\xff\xff\xff.", b"\x80\x02X\xff\xff\xff\xffabc.",
                     b"\x80\x02X\x01\x00\x00\x00\xff.", b"\x80\x02NNs.", b"\x80\x02}(NNNu.", b"\x80\x02}](Nu.", b"\x80\x02(Na.",
                     b"\x80\x02}}Ns.", b"\x80\x02](0.", b"\x80\x02cos", b"\x80\x02c\xff\n\n.", b"\x80\x02NQ.", b"\x80\x02NNb.",
                     b"\x80\x02\x8a\xff", b"\x80\x04NN\x93.", b"\x80\x02]q\x00a.", b"\x80\x02(\x85.", b"\x80\x02q\x00."):
            with self.subTest(data=data):
                self.assert_refused(self.save(data))

    def test_bombs_are_refused_or_cheap(self):
        start = time.monotonic()
        nested = b"\x80\x02" + b"(" * 1_000_000
        self.assert_refused(self.save(nested))
        deep = b"\x80\x02)" + b"\x85" * 1_000_000 + b"."
        self.assert_refused(self.save(deep), "not a state dict")
        memo = b"\x80\x02]" + b"r\xff\xff\xff\xff" * 1000 + b"."
        self.assert_refused(self.save(memo), "not a state dict")
        doubling = b"\x80\x02)" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200)) + b"."
        self.assert_refused(self.save(doubling))
        self.assertLess(time.monotonic() - start, 60)

    def test_integers_whose_hashes_meet_are_refused_at_once(self):
        meet = ((1 << 61) - 1) * 4  # all have the hash 0
        numbers = b"".join(op(meet * i) + b"N" for i in range(1, 30_000))
        start = time.process_time()
        self.assert_refused(self.save(b"\x80\x02}(" + numbers + b"u."), "no number of a parameter")
        self.assertLess(time.process_time() - start, 3)

    def test_a_storage_that_many_tensors_share_is_not_written_for_each(self):
        model = tiny_model(num_layers=4, ffn_dim=5000)
        most = max(len(values) for _, values in model.values())
        state = {k: tensor("0", shape, elements=most) for k, (shape, _) in model.items()}
        self.assert_refused(self.save(state, {"0": bytes(4 * most)}), "share their storages", arguments=["--num-heads", 1])

    def test_a_storage_is_read_once(self):
        model, at, reads = tiny_model(num_layers=3), 0, collections.Counter()
        state = {}
        for i, (tensor_name, (shape, values)) in enumerate(model.items()):
            state[tensor_name] = tensor(str(i % 2), shape, elements=8000, offset=at)
            at += len(values)
        path = self.save(state, {"0": bytes(32000), "1": bytes(32000)})
        read = Archive.read

        def counted(archive, name, limit):
            reads[name] += 1
            return read(archive, name, limit)

        with mock.patch.object(Archive, "read", counted):
            self.assertEqual(self.convert_here(path, "--num-heads", 1)[0], 0)
        self.assertEqual((reads["data/0"], reads["data/1"]), (1, 1))

    def test_tensors_that_reach_outside_their_storage(self):
        good, storages = state_and_storages(tiny_model())
        for bad in (tensor("0", (6, 8), offset=1), tensor("0", (6, 8), stride=(9, 1)), tensor("0", (6, 8), elements=47),
                    tensor("0", (6, 8), offset=-1), tensor("0", (6, 8), stride=(-8, 1)), tensor("0", (6, 8), stride=(8,)),
                    tensor("0", (1 << 62, 1 << 62), elements=48), tensor("0", (6, 8), elements=1, stride=(0, 0)),
                    tensor("0", (6, 8), elements=1 << 60), tensor("0", (-6, 8)), tensor("0", (6, 8), stride=(8, True)),
                    tensor("0", (6.0, 8), stride=(8, 1)), tensor("../../etc/passwd", (6, 8)), tensor("", (6, 8)),
                    tensor("0", (1,) * 9)):
            self.assert_refused(self.save({**good, "embedding.weight": bad}, storages), arguments=["--num-heads", "1"])

    def test_storages_that_are_missing_or_short(self):
        state, storages = state_and_storages(tiny_model())
        arguments = ["--num-heads", "1"]
        self.assert_refused(self.save(state, {k: v for k, v in storages.items() if k != "3"}), "data/3", "missing",
                            arguments=arguments)
        self.assert_refused(self.save(state, {**storages, "3": storages["3"][:-1]}), "data/3", "expected",
                            arguments=arguments)

    def test_archives_that_are_no_checkpoints(self):
        path = self.folder / "checkpoint.pt"
        for data, part in ((b"", "no zip"), (b"hello", "no zip"), (b"PK\x03\x04", "cut short"), (b"<!DOCTYPE html>", "web page"),
                           (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"), (LEGACY_MAGIC, "before 1.6"),
                           (b"\x02\0\0\0\0\0\0\0{}", "safetensors")):
            path.write_bytes(data)
            self.assert_refused(path, part)
        whole = self.save_model().read_bytes()
        path.write_bytes(whole[:len(whole) // 2])
        self.assert_refused(path, "cut short")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "")
        self.assert_refused(path, "data.pkl")

    def test_compressed_and_damaged_archives(self):
        state, storages = state_and_storages(tiny_model())
        path = self.save(state, storages, compression=zipfile.ZIP_DEFLATED)
        self.assert_refused(path, "compressed")
        path = self.save(state, storages)
        data = bytearray(path.read_bytes())
        at = data.find(storages["0"])
        data[at] ^= 1
        path.write_bytes(data)
        self.assert_refused(path, "data/0", "damaged", arguments=["--num-heads", "1"])

    def test_big_endian_archives(self):
        path = self.folder / "checkpoint.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("m/data.pkl", b"\x80\x02}.")
            archive.writestr("m/byteorder", "big")
        self.assert_refused(path, "big-endian")

    def test_names_from_a_checkpoint_do_not_reach_the_terminal_raw(self):
        state, storages = state_and_storages(tiny_model())
        state["evil\x1b[2J\nname"] = tensor("0", (6, 8))
        done = self.run_script(self.save(state, storages), "-o", self.out, "--num-heads", 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("\x1b", done.stderr)
        self.assertIn("evil\\x1b[2J name", done.stderr)


class RefusalsTest(ConvertCase):
    def test_missing_and_misshapen_tensors(self):
        for tensor_name in ("embedding.weight", "norm.weight", "blocks.0.W_g.bias", "blocks.0.ffn.0.weight"):
            model = {k: v for k, v in tiny_model().items() if k != tensor_name}
            self.assert_refused(self.save_model(model), tensor_name, "missing")
        model = {**tiny_model(), "blocks.0.W_g.weight": ((4, 16), [0.0] * 64)}
        self.assert_refused(self.save_model(model), "blocks.0.W_g.weight", "[4, 16]", "[8, 8]")

    def test_types_that_are_no_weights(self):
        for kind in ("DoubleStorage", "LongStorage", "BoolStorage"):
            state, storages = state_and_storages(tiny_model())
            state["norm.weight"] = tensor("0", (8,), 8, kind=kind)
            self.assert_refused(self.save(state, storages), "norm.weight", "expected F32, F16 or BF16",
                                arguments=["--num-heads", "1"])

    def test_configuration_that_contradicts_the_shapes(self):
        wrap = lambda config: lambda state: {"model_state_dict": state, "config": config}
        for config, parts in (({"num_heads": 2, "vocab_size": 7}, ("vocab_size", "found 7", "expected 6")),
                              ({"num_heads": 3}, ("num_heads", "divisor of model_dim 8")),
                              ({"num_heads": True}, ("num_heads",)), ({"num_heads": 0}, ("num_heads",)),
                              ({"num_heads": 2, "use_hem": True}, ("use_hem",)),
                              ({"num_heads": 2, "mem_dim": 4}, ("mem_dim",)),
                              ({"num_heads": 2, "use_sparse": True}, ("use_sparse",))):
            self.assert_refused(self.save_model(wrap=wrap(config)), *parts)

    def test_configuration_files(self):
        path = self.save_model()
        file = self.folder / "c.json"
        for text, part in (("[]", "JSON object"), ("{", "not JSON"), ('{"num_heads":1,"num_heads":1}', "duplicate"),
                           ('{"num_heads":8,"ffn_dim":13}', "ffn_dim"), ('{"model_type":"llama"}', "model_type"),
                           ("[" * 100_000, "not JSON")):
            file.write_text(text)
            self.assert_refused(path, part, arguments=["--config", file])
        self.assert_refused(path, "none.json", arguments=["--config", self.folder / "none.json"])

    def test_values_that_the_programs_refuse_are_refused(self):
        file, path = self.folder / "c.json", self.save_model(wrap=lambda state: state)
        for text in ('"mdi_mix":NaN', '"mdi_mix":-1', '"mdi_mix":1e999', '"mdi_mix":"0.1"', '"mdi_mix":true', '"memory_slots":-1',
                     '"memory_slots":1.0', '"memory_slots":16777217', '"memory_segment":0', '"memory_segment":null',
                     '"carry_state":1', '"max_seq_len":Infinity', '"bos_token_id":6', '"bos_token_id":-1', '"eos_token_id":[1,6]',
                     '"eos_token_id":[1,null]', '"eos_token_id":{}', '"dpg_rank":0', '"mem_dim":-1', '"use_sparse":0'):
            file.write_text('{"num_heads":1,' + text + "}")
            with self.subTest(config=text):
                self.assert_refused(path, text.split('"')[1] + ": found ", arguments=["--config", file])
            own = json.loads("{" + text + "}")
            if not any(isinstance(value, dict) for value in own.values()):  # and where the checkpoint brings it along
                inside = self.save_model(wrap=lambda state: {"model_state_dict": state, "config": {"num_heads": 1, **own}})
                code, error = self.convert_here(inside)
                self.assertIn("note: " if code == 0 else text.split('"')[1] + ": found ", error)
                self.save_model(wrap=lambda state: state)
        file.write_text('{"num_heads":1,"no_such_key":NaN}')
        self.convert(path, "--config", file)
        self.assertNotIn("no_such_key", (self.out / "config.json").read_text())

    def test_devices_and_pipes_are_not_read(self):
        os.mkfifo(self.folder / "pipe")
        os.truncate(self.save_model().rename(self.folder / "large"), 65 << 20)
        other = "not a regular file"
        for path, part in (("/dev/zero", other), (self.folder / "pipe", other), (self.folder, other),
                           (self.folder / "large", "file is too large")):
            for option in ("--config", "--tokenizer"):
                self.assert_refused(self.save_model(), part, arguments=[option, path])

    def test_inputs_that_are_not_there(self):
        self.assert_refused(self.folder / "none.pt", "none.pt", "no such file")
        self.assert_refused(self.folder, "not a regular file")
        self.assert_refused(self.save_model(), "none.model", arguments=["--tokenizer", self.folder / "none.model"])

    def test_usage(self):
        for arguments in ((), ("x.pt",), ("x.pt", "-o", "y", "--dtype", "f64"), ("x.pt", "-o", "y", "--unknown"),
                          ("x.pt", "-o", "y", "--num-heads", "two"), ("x.pt", "-o", "y", "--max-shard-size", "0"),
                          ("x.pt", "-o", "y", "--max-shard-size", "5 parsecs"), ("x.pt", "z.pt", "-o", "y")):
            done = self.run_script(*arguments, cwd=self.folder)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_outputs_that_cannot_be_written(self):
        path = self.save_model()
        (self.folder / "file").write_text("")
        (self.folder / "full").mkdir()
        (self.folder / "full/x").write_text("")
        for out in ("file", "full", "none/out", "file/out"):
            done = self.run_script(path, "-o", self.folder / out)
            self.assertEqual(done.returncode, 5, (out, done.stderr))
            self.assertEqual(sorted(os.listdir(self.folder)), ["checkpoint.pt", "file", "full"])

    def test_a_failure_on_the_way_leaves_nothing(self):
        state, storages = state_and_storages(tiny_model())
        del storages[str(len(storages) - 1)]  # found only after most of the file was written
        self.assert_refused(self.save(state, storages), "missing", arguments=["--num-heads", "1"])

    def test_termination_on_the_way_leaves_nothing(self):
        shape, model = (200_000, 8), tiny_model(vocab_size=200_000)
        model["embedding.weight"] = model["lm_head.weight"] = (shape, [0.5] * (shape[0] * shape[1]))
        path = self.save_model(model)
        process = subprocess.Popen([sys.executable, "-I", str(SCRIPT), str(path), "-o", str(self.out), "--dtype", "bf16"],
                                   stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not any(entry.startswith(".out.") for entry in os.listdir(self.folder)):
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "ended before it could be stopped")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 143)
        self.assertEqual(os.listdir(self.folder), ["checkpoint.pt"])


if __name__ == "__main__":
    unittest.main()
