#!/usr/bin/env python3
"""Turns a checkpoint of MM-Rec into a model folder: config.json, model.safetensors, tokenizer.model.

    convert.py CHECKPOINT.pt --tokenizer tokenizer.model -o FOLDER [--config config.json] [--num-heads N]
               [--expert both|text|code] [--dtype keep|f32|bf16|f16] [--max-shard-size 5GB]
    convert.py CHECKPOINT.msgpack --config RUN.json -o FOLDER [--bank true|false] [--calls stepwise|prompt|whole] [...]

A name that ends in .msgpack is a checkpoint of Flax, any other one of PyTorch; which of the models is in it the
tensors tell. Needs Python 3.9, the folder conversion beside it and docs/schemas, nothing else. What must stay true:
  * Nothing in the checkpoint is ever executed, and nothing is made of it but names, numbers and arrays.
  * The folder appears whole or not at all.
Exit codes: 0 done, 2 usage, 3 input rejected, 4 out of memory, 5 cannot write. An error is one line on stderr.
"""
import argparse
import json
import os
import re
import signal
import sys

sys.dont_write_bytecode = True  # the source tree stays as it is
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # which `python3 -I` leaves out

from conversion import flax, mmrec, mmrec100m, mmrec_jax, pytorch  # noqa: E402
from conversion.common import CannotWrite, Rejected, one_line, read_file  # noqa: E402
from conversion.dtypes import WEIGHT_DTYPES  # noqa: E402
from conversion.folder import write_folder  # noqa: E402
from conversion.schema import check_config  # noqa: E402
from conversion.tokenizer import read_tokenizer  # noqa: E402

MAX_CONFIG_BYTES = 1 << 20
MAX_SHARING = 2


def read_json(path):
    def no_duplicates(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    try:
        value = json.loads(read_file(path, MAX_CONFIG_BYTES).decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{path}: not JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise Rejected(f"{path}: expected a JSON object")
    return value


def parse_size(text):
    match = re.fullmatch(r"([0-9]{1,15})(|KB|MB|GB)", text)
    if not match or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"invalid size '{text}' (expected a number of bytes, KB, MB or GB)")
    return int(match.group(1)) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match.group(2)]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. Try: {self.prog} --help\n")


def parse_arguments(arguments):
    parser = Parser(prog="convert.py", allow_abbrev=False,
                    description="Turns a checkpoint of MM-Rec into a model folder. Nothing in it is executed.",
                    epilog="Models: mmrec and mmrec100m of PyTorch, mmrec-jax of Flax. A checkpoint of Flax has a name that "
                           "ends in .msgpack; give it the run's JSON file with --config.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT",
                        help="PyTorch: a state dict, or a dictionary with model_state_dict; Flax: a training state, or its "
                             "parameters alone")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="must not exist, or be empty")
    parser.add_argument("--tokenizer", metavar="FILE", help="a sentencepiece model or, with tokenizer_config.json beside it unless it is cl100k_base's, a rank "
                             "file of tiktoken")
    parser.add_argument("--config", metavar="FILE", help="JSON with what the checkpoint does not tell")
    parser.add_argument("--num-heads", metavar="N", type=int, help="attention heads, where the checkpoint does not say")
    parser.add_argument("--expert", choices=mmrec100m.EXPERTS, help="mmrec100m: the expert to run; default: both")
    parser.add_argument("--bank", choices=("true", "false"),
                        help="mmrec-jax: whether the run wrote its memory bank; code from before 2025-12-15 did not; "
                             "default: true")
    parser.add_argument("--calls", choices=mmrec_jax.CALLS,
                        help="mmrec-jax: how a sequence is cut into calls of the model; default: prompt")
    parser.add_argument("--dtype", choices=["keep", "f32", "bf16", "f16"], default="keep", help="default: keep")
    parser.add_argument("--max-shard-size", metavar="SIZE", type=parse_size, default="5GB", help="default: 5GB")
    return parser.parse_args(arguments)


def refuse_options(options, names, model_type):
    for name in names:
        if getattr(options, name) is not None:
            raise Rejected(f"--{name}: found with the model {model_type}, which does not have this setting")


def convert_pytorch(options, given):
    archive, root = pytorch.read_checkpoint(options.checkpoint)
    state = pytorch.find_state_dict(root)
    pytorch.refuse_quantised(root, state)
    tensors = pytorch.strip_prefixes(state)
    if mmrec100m.is_one(tensors):
        refuse_options(options, ("bank", "calls"), mmrec100m.MODEL_TYPE)
        finish(options, archive, *mmrec100m.plan(tensors, root, given, options))
    else:
        refuse_options(options, ("expert", "bank", "calls"), "mmrec")
        finish(options, archive, *mmrec.plan(tensors, root, given, options))


def convert_flax(options, given):
    with open(options.checkpoint, "rb") as file:
        checkpoint = flax.Checkpoint(file)
        refuse_options(options, ("expert",), mmrec_jax.MODEL_TYPE)
        finish(options, checkpoint, *mmrec_jax.plan(checkpoint.tensors, given, options))


def finish(options, source, config, selected, others):
    """Writes the folder; `source` has the tensors' bytes."""
    check_config(config)
    stored = sum(t.elements * t.dtype[1] for t in selected.values())
    if stored > MAX_SHARING * source.size:
        raise Rejected(f"found tensors of {stored} bytes in a file of {source.size}: they share their storages; expected at most "
                       f"{MAX_SHARING} times the file, as tied embeddings make")
    if others:
        shown = one_line(", ".join(others[:3])) + (", ..." if len(others) > 3 else "")
        print(f"convert.py: note: {len(others)} tensors that inference does not use are left out ({shown})",
              file=sys.stderr)
    tokenizer = {}
    if options.tokenizer:
        tokenizer = read_tokenizer(options.tokenizer, config["vocab_size"])
    else:
        print("convert.py: note: without --tokenizer the folder has none", file=sys.stderr)
    dtype = None if options.dtype == "keep" else options.dtype.upper()
    try:
        write_folder(options.output, config, selected, dtype, source, tokenizer, options.max_shard_size)
    except OSError as error:
        raise CannotWrite(f"{options.output}: {error.strerror or one_line(error)}") from None
    bytes_of = sum(t.elements * WEIGHT_DTYPES[dtype or t.dtype[0]] for t in selected.values())
    print(f"convert.py: {options.output}: {len(selected)} tensors, {bytes_of} bytes", file=sys.stderr)


def convert(options):
    if not os.path.isfile(options.checkpoint):
        raise Rejected("no such file" if not os.path.exists(options.checkpoint) else "not a regular file")
    given = read_json(options.config) if options.config else {}
    if options.checkpoint.lower().endswith(".msgpack"):
        convert_flax(options, given)
    else:
        convert_pytorch(options, given)


def main(arguments):
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that nothing half-written stays
    try:
        convert(options)
        return 0
    except Rejected as error:
        print(f"convert.py: {options.checkpoint}: {one_line(error)}", file=sys.stderr)
        return 3
    except CannotWrite as error:
        print(f"convert.py: {one_line(error)}", file=sys.stderr)
        return 5
    except OSError as error:
        print(f"convert.py: {error.filename or options.checkpoint}: {error.strerror or one_line(error)}", file=sys.stderr)
        return 3
    except MemoryError:
        print(f"convert.py: {options.checkpoint}: not enough memory", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
