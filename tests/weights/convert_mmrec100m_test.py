#!/usr/bin/env python3
"""weights/convert.py on MMRec100M: sizes come from the tensors, and what no model here computes is refused by its name.

The fixture's checkpoint.pt is the public code's own, without the storages of its optimizer.
"""
import json
import shutil
import sys
import unittest

sys.dont_write_bytecode = True

from checkpoints import UPSTREAM, ConvertCase, name, state_and_storages, tensor, tiny_model, with_values  # noqa: E402

from conversion import mmrec100m  # noqa: E402

SIZES = {"vocab_size": 6, "expert_dim": 8, "num_layers": 1, "ffn_dim": 12}


def tiny_100m(**sizes):
    return with_values(mmrec100m.tensor_specs({**SIZES, **sizes}))


class Mmrec100mCase(ConvertCase):
    def save_100m(self, model=None, wrap=lambda state: {"model_state_dict": state}):
        return self.save_model(tiny_100m() if model is None else model, wrap)


class ConversionTest(Mmrec100mCase):
    def test_checkpoint_of_the_public_code(self):
        self.expect_fixture(self.convert(UPSTREAM / "mmrec100m/checkpoint.pt"), "mmrec100m")
        expected = json.loads((UPSTREAM / "mmrec100m/config.json").read_text())
        for ignored in ("max_seq_len", "fusion_method"):
            del expected[ignored]
        self.assertEqual(self.config(), {**expected, "expert": "both"})

    def test_fixture_with_its_own_configuration_and_an_expert(self):
        self.convert(UPSTREAM / "mmrec100m/checkpoint.pt", "--config", UPSTREAM / "mmrec100m/config.json", "--expert", "code")
        self.assertEqual(self.config()["expert"], "code")

    def test_sizes_come_from_the_tensors(self):
        for key in ("args", "config"):
            settings = {"vocab_size": 100277, "expert_dim": 3, "num_layers": 9, "ffn_dim": 5, "num_heads": 4, "mdi_mix": 0.25,
                        "mem_dim": 256, "lr": 0.5, "betas": [0.9, 0.99], "max_seq_len": None}
            converted = self.convert(self.save_100m(tiny_100m(num_layers=2, ffn_dim=20),
                                                    lambda state: {"model_state_dict": state, key: settings}))
            self.assertEqual(self.config(), {"model_type": "mmrec100m", "vocab_size": 6, "expert_dim": 8, "num_layers": 2,
                                             "ffn_dim": 20, "num_heads": 4, "mdi_mix": 0.25, "expert": "both"})
            self.assertEqual(len(converted), len(tiny_100m(num_layers=2)))
            shutil.rmtree(self.out)

    def test_compiled_models_and_heads_that_nothing_tells(self):
        converted = self.convert(self.save_100m(wrap=lambda s: {"model_state_dict": {"_orig_mod." + k: v for k, v in s.items()}}))
        self.assertEqual(set(converted), set(tiny_100m()))
        self.assertEqual(self.config()["num_heads"], 1)

    def test_settings_from_a_file_and_options(self):
        file = self.folder / "c.json"
        file.write_text('{"model_type": "mmrec100m", "expert": "text", "num_heads": 2, "mdi_mix": 0, "bos_token_id": 1, '
                        '"eos_token_id": [2, 3], "mem_dim": null, "optimizer": "adam"}')
        self.convert(self.save_100m(), "--config", file, "--num-heads", 8)
        self.assertEqual(self.config(), {"model_type": "mmrec100m", **SIZES, "num_heads": 8, "mdi_mix": 0, "bos_token_id": 1,
                                         "eos_token_id": [2, 3], "expert": "text"})

    def test_planning_is_left_out(self):
        model = tiny_100m()
        model["code_expert.blocks.0.mdi.W_planning_error.weight"] = ((2, 2), [0.0] * 4)
        self.assertEqual(set(self.convert(self.save_100m(model))), set(tiny_100m()))


class RefusalsTest(Mmrec100mCase):
    def refuse(self, changes, *parts):
        """A model with other tensors: {name: (shape, values)}, None for one that is missing."""
        model = {k: v for k, v in {**tiny_100m(), **changes}.items() if v is not None}
        self.assert_refused(self.save_100m(model), *parts)

    def test_quantised_checkpoints_and_observers(self):
        self.assert_refused(self.save_100m(wrap=lambda s: {"model_state_dict": s, "quantized": True}), "found quantized")
        for key in ("fusion.fusion_proj.weight_fake_quant.scale", "lm_head.activation_post_process.min_val",
                    "text_expert.blocks.0.W_q._packed_params.dtype", "lm_head.zero_point"):
            self.refuse({key: ((1,), [1.0])}, "quantis", key)
        for module, attribute in (("torch._utils", "_rebuild_qtensor"), ("torch", "QInt8Storage"), ("torch", "qint8"),
                                  ("torch", "per_channel_affine"), ("torch.ao.nn.quantized.modules.linear", "Linear")):
            path = self.save_100m(wrap=lambda s: {"model_state_dict": s, "x": name(module, attribute)})
            self.assert_refused(path, "quantised", f"{module}.{attribute}")

    def test_unquantised_checkpoints_say_so(self):
        self.convert(self.save_100m(wrap=lambda s: {"model_state_dict": s, "quantized": False, "args": {"use_qat": False}}))

    def test_weighted_fusion(self):
        self.refuse({"fusion.gate.0.weight": ((8, 16), [0.0] * 128)}, "fusion_method", "weighted", "fusion.gate.0.weight")
        self.assert_refused(self.save_100m(wrap=lambda s: {"model_state_dict": s, "args": {"fusion_method": "weighted"}}),
                            "fusion_method", "'weighted'")

    def test_tensors_that_are_missing_misshapen_or_unknown(self):
        for tensor_name in ("embedding.weight", "lm_head.weight", "final_norm.weight", "fusion.fusion_proj.bias",
                            "text_expert.norm.weight", "code_expert.blocks.0.W_q.weight", "code_expert.blocks.0.ffn.3.bias"):
            self.refuse({tensor_name: None}, tensor_name, "missing")
        self.refuse({"lm_head.weight": ((6, 8), [0.0] * 48)}, "lm_head.weight", "[6, 8]", "[6, 16]")
        for unknown in ("code_expert.blocks.0.W_fused.weight", "fusion.more", "code_expert.blocks.0.W_gamma_up.bias"):
            self.refuse({unknown: ((1,), [0.0])}, unknown)
        model = {k: v for k, v in tiny_100m(num_layers=2).items() if not k.startswith("code_expert.blocks.1")}
        self.assert_refused(self.save_100m(model), "found 1 layers, expected 2")
        model = {k.replace("blocks.0", "blocks.1") if k.startswith("text") else k: v for k, v in tiny_100m().items()}
        self.assert_refused(self.save_100m(model), "text_expert.blocks.")
        self.assert_refused(self.save_100m(tiny_100m(expert_dim=6)), "6 columns", "multiple of 4")
        state, storages = state_and_storages(tiny_100m())
        state["final_norm.weight"] = tensor("0", (16,), 48, kind="DoubleStorage")
        self.assert_refused(self.save(state, storages), "final_norm.weight", "F64")

    def test_settings(self):
        file = self.folder / "c.json"
        path = self.save_100m()
        for text, part in (('{"model_type": "mmrec"}', "model_type"), ('{"vocab_size": 7}', "vocab_size"),
                           ('{"expert": "math"}', "expert"), ('{"expert": ["text"]}', "expert"), ('{"mdi_mix": 11}', "mdi_mix"),
                           ('{"mdi_mix": NaN}', "mdi_mix"), ('{"num_heads": 3}', "num_heads"), ('{"num_heads": true}', "num_heads"),
                           ('{"eos_token_id": 6}', "eos_token_id"), ('{"eos_token_id": []}', "eos_token_id"),
                           ('{"bos_token_id": "x"}', "bos_token_id"), ('{"num_layers": 1.0}', "num_layers")):
            file.write_text(text)
            self.assert_refused(path, part, arguments=["--config", file])
        self.assert_refused(self.save_100m(wrap=lambda s: {"model_state_dict": s, "args": {"num_heads": "x"}}), "num_heads")

    def test_options_of_other_models(self):
        self.assert_refused(self.save_100m(), "--bank", "mmrec100m", arguments=["--bank", "false"])
        self.assert_refused(self.save_100m(), "--calls", "mmrec100m", arguments=["--calls", "whole"])
        self.assert_refused(self.save_model(tiny_model()), "--expert", "mmrec", arguments=["--expert", "both"])
        done = self.run_script(self.save_100m(), "-o", self.out, "--expert", "all")
        self.assertEqual(done.returncode, 2, done.stderr)


if __name__ == "__main__":
    unittest.main()
