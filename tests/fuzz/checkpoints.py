#!/usr/bin/env python3
"""Checkpoints of any bytes are refused by weights/convert.py's readers in the one way there is, or are read.

Mutates pickles and archives of torch.save and maps of msgpack by a fixed seed. Whatever escapes but Rejected, takes more
than a few seconds or more memory than the limit ends the program; the input is then left in --findings.
"""
import argparse
import pathlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "weights"), str(ROOT / "tests/weights")]

from conversion import flax, mmrec, mmrec100m, mmrec_jax, pytorch  # noqa: E402
from conversion.common import Rejected  # noqa: E402
from conversion.pickle_reader import PickleReader  # noqa: E402
import checkpoints as built  # noqa: E402

MOST_BYTES = 4 << 30   # of address space
MOST_SECONDS = 5       # of one input
MOST_INPUT = 1 << 16   # bytes


class Options:
    num_heads = 1
    expert = bank = calls = long_mem_len = None


def read_state(archive, root):
    """What convert.py does with what a pickle holds, up to the bytes of each tensor."""
    state = pytorch.find_state_dict(root)
    pytorch.refuse_quantised(root, state)
    tensors = pytorch.strip_prefixes(state)
    model = mmrec100m if any(name.startswith("text_expert.") for name in tensors) else mmrec
    config, selected, _ = model.plan(tensors, root, {}, Options)
    for tensor in selected.values() if archive else ():
        if tensor.elements:
            archive.tensor(tensor)
    return config


def read_pickle(data, _):
    read_state(None, PickleReader(data).read())


def read_archive(data, path):
    path.write_bytes(data)
    read_state(*pytorch.read_checkpoint(path))


def read_msgpack(data, path):
    path.write_bytes(data)
    with open(path, "rb") as file:
        checkpoint = flax.Checkpoint(file)
        _, selected, _ = mmrec_jax.plan(checkpoint.tensors, {}, Options)
        for tensor in selected.values():
            checkpoint.tensor(tensor)


READERS = {b"p": read_pickle, b"z": read_archive, b"m": read_msgpack}


def seeds(folder):
    """Inputs: the letter of a reader, and what it reads."""
    inputs = []
    models = [built.tiny_model(), built.tiny_model(use_hem=True),
              built.with_values(mmrec100m.tensor_specs({"vocab_size": 4, "expert_dim": 4, "num_layers": 1, "ffn_dim": 4}))]
    for model in models:
        state, storages = built.state_and_storages(model)
        roots = [state, {"model_state_dict": state, "config": {"num_heads": 2, "x": [None, 1.5, (True, "a")]}}]
        for root in roots:
            inputs.append(b"p\x80\x02" + built.op(root) + b".")
        built.archive_bytes(roots[0], storages, folder / "seed")
        inputs.append(b"z" + (folder / "seed").read_bytes())
    model = built.with_values(mmrec_jax.tensor_specs({"vocab_size": 5, "model_dim": 4, "num_layers": 1}))
    arrays = {name: built.array(shape, values) for name, (shape, values) in model.items()}
    inputs.append(b"m" + built.pack({"params": arrays, "step": built.ext(3, built.pack([[], "int32", bytes(4)]))}))
    return inputs


def out_of_time(*_):
    raise TimeoutError(f"more than {MOST_SECONDS} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--executions", type=int, default=0, help="end after so many (0: no limit)")
    parser.add_argument("--seconds", type=float, default=0, help="end after so long (0: no limit)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGALRM, out_of_time)
    rng = random.Random(arguments.seed)
    begin, done, read = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None) as folder:
        folder = pathlib.Path(folder)
        pool = seeds(folder)
        unchanged = list(pool)
        while True:
            if unchanged:
                data = unchanged.pop()
            else:
                data = rng.choice(pool)
                data = data[:1] + built.mutated(data[1:], rng, rng.choice(pool)[1:])[:MOST_INPUT]
            signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
            try:
                READERS[data[:1]](data[1:], folder / "input")
                read += 1
                if len(pool) < 2000 and len(data) < 1 << 14:
                    pool.append(data)  # what is read is worth going on from
            except Rejected as error:
                assert str(error), "a refusal without a word"
            except Exception:  # what the program is for
                signal.setitimer(signal.ITIMER_REAL, 0)
                traceback.print_exc()
                arguments.findings.mkdir(parents=True, exist_ok=True)
                path = arguments.findings / f"checkpoints-{arguments.seed}-{done}"
                path.write_bytes(data)
                print(f"{path}: this input", file=sys.stderr)
                return 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            done += 1
            if not unchanged and ((arguments.executions and done >= arguments.executions)
                                  or (arguments.seconds and time.monotonic() - begin >= arguments.seconds)):
                break
    print(f"{done} inputs, {read} of them read, {done / (time.monotonic() - begin):.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
