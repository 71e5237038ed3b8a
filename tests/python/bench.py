"""What Python costs beside the programs: see scripts/bench-python."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import timeit

import numpy as np

import mmrec
from mmrec import ops

ROOT = pathlib.Path(__file__).resolve().parents[2]


def documents(count, tokenizer):
    """Texts of many lengths, of words of the vocabulary."""
    rng = np.random.default_rng(1)
    return [tokenizer.decode(rng.integers(300, 8000, int(size))) for size in rng.integers(20, 400, count)]


def program(name, arguments):
    """The tokens a second that a program reports."""
    folder = pathlib.Path(os.environ.get("MMREC_PROGRAMS", ROOT / "build/cpu/apps"))
    run = subprocess.run([folder / name, *arguments], check=True, capture_output=True, text=True)
    return float(re.search(r"([\d.,]+) tok/s", run.stderr).group(1).replace(",", ""))


def scoring(model, tokenizer, texts):
    """Reads, tokenises, scores and sums, as mmrec-ppl does."""
    start = time.perf_counter()
    total = mmrec.PerplexityAccumulator()
    scorer = mmrec.Scorer(model)
    for text, score in zip(texts, scorer.score_stream(tokenizer.encode_stream(texts))):
        total.add(score, len(text.encode()), mmrec.count_words(text))
    return total.summary().tokens / (time.perf_counter() - start)


def generating(model, tokenizer, prompts, tokens):
    start = time.perf_counter()
    generator = mmrec.Generator(model, tokenizer)
    results = generator.generate(
        prompts, max_tokens=tokens, temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, seed=1, logprobs=False
    )
    return sum(len(result.tokens) for result in results) / (time.perf_counter() - start)


def overhead():
    """Microseconds of a call of mmrec.ops on arrays of a few numbers, beside a call of the library's own."""
    arrays = [("NumPy", np.asarray, np.exp)]
    with contextlib.suppress(ImportError):
        import torch

        arrays.append(("PyTorch", torch.tensor, torch.exp))
    with contextlib.suppress(ImportError):
        import jax

        arrays.append(("JAX", jax.numpy.asarray, jax.numpy.exp))
    for name, make, theirs in arrays:
        a, b = make(np.full((4, 16), -0.1, np.float32)), make(np.ones((4, 16), np.float32))
        calls = {"mmrec.ops.decay_scan": lambda: ops.decay_scan(a, b), "exp": lambda: theirs(a)}
        times = {what: min(timeit.repeat(call, number=2000, repeat=7)) / 2000 * 1e6 for what, call in calls.items()}
        print(f"overhead, {name}: " + ", ".join(f"{what} {us:.1f} us" for what, us in times.items()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    model = mmrec.Model.load(device=options.device)
    tokenizer = mmrec.Tokenizer.load()
    texts = documents(options.documents, tokenizer)
    prompts = [" ".join(text.split()[:6]) for text in documents(options.prompts, tokenizer)]
    rates, of_ids = {"scoring": ([], []), "generating": ([], [])}, []
    with tempfile.TemporaryDirectory() as folder:
        corpus, ids, lines = (pathlib.Path(folder) / name for name in ("corpus.jsonl", "ids.jsonl", "prompts.txt"))
        ids.write_text("".join(json.dumps(one.tolist()) + "\n" for one in tokenizer.encode_batch(texts)))
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        lines.write_text("".join(prompt + "\n" for prompt in prompts))
        common = ["--device", options.device]
        sampling = f"-n {options.tokens} -s 1 --temp 0.7 --top-k 0 --top-p 0.95 --min-p 0 --repeat-penalty 1"
        generate = ["--lines", "-f", lines, *sampling.split(), "-o", pathlib.Path(folder) / "out.jsonl"]
        for _ in range(options.repeat):  # in turns, so that what else the machine does concerns both
            rates["scoring"][0].append(program("mmrec-ppl", [*common, corpus]))
            of_ids.append(program("mmrec-ppl", [*common, "--ids", ids]))
            rates["scoring"][1].append(scoring(model, tokenizer, texts))
            rates["generating"][0].append(program("mmrec-generate", [*common, *generate]))
            rates["generating"][1].append(generating(model, tokenizer, prompts, options.tokens))
    overhead()
    text = max(rates["scoring"][0])
    print(f"mmrec-ppl: text {text:.0f} tok/s, the same as ids {max(of_ids):.0f}: {text / max(of_ids):.1%}")
    for name, (theirs, ours) in rates.items():
        print(
            f"{name}: program {max(theirs):.0f} tok/s, Python {max(ours):.0f} tok/s, {max(ours) / max(theirs):.1%} "
            f"(best of {options.repeat}; medians {np.median(theirs):.0f}, {np.median(ours):.0f})"
        )


if __name__ == "__main__":
    main()
