#!/usr/bin/env python3
"""Writes tests/fixtures/windows.json: which tokens the public rules give a model and which of them count.

Each rule is written down from its program's documentation, in its own terms; tokens stand for themselves by their
position in the document, so that a case is a list of (tokens given, number of them that count at the end).

rolling  lm-evaluation-harness, loglikelihood_rolling: predictions in windows of N, each given the N tokens before its
         last prediction; the prefix (here the document's first token) before the first window only.
strided  Hugging Face's page "Perplexity of fixed-length models": labels of tokens that an earlier window had are masked,
         and the model shifts labels by one, so a window's first token never counts.
llama    llama-perplexity: T // N chunks of N tokens, BOS written over each one's first, logits from N // 2 on.
"""
import json
import pathlib

PREFIX = 0


def rolling(tokens, n):
    predicted = tokens[1:]  # the first is the prefix
    done, windows = 0, []
    while done < len(predicted):
        targets = predicted[done:done + n]
        end = done + len(targets)
        inputs = ([PREFIX] + predicted)[max(0, end - n):end]  # the N before the last prediction
        windows.append((inputs + targets[-1:], len(targets)))
        done = end
    return windows


def strided(tokens, n, stride):
    windows, previous_end = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + n, len(tokens))
        labels = [t if t >= previous_end else None for t in tokens[begin:end]]
        windows.append((tokens[begin:end], sum(label is not None for label in labels[1:])))
        previous_end = end
        if end == len(tokens):
            break
    return windows


def llama(tokens, n):
    if len(tokens) < 2 * n:
        return None
    windows = []
    for chunk in range(len(tokens) // n):
        given = [PREFIX] + tokens[chunk * n + 1:(chunk + 1) * n]
        predictions = range(n // 2, n - 1)  # logits at these positions, of the token after each
        windows.append((given, len(predictions)))
    return windows


def cases():
    for length in [2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 32, 33]:
        tokens = list(range(length))
        for n in [1, 2, 3, 4, 5, 8, 11, 16, 40]:
            yield {"mode": "rolling", "tokens": length, "window": n, "windows": rolling(tokens, n)}
            if n >= 4:
                yield {"mode": "llama", "tokens": length, "window": n, "windows": llama(tokens, n)}
            for stride in sorted({1, n // 2, n - 1, n} - {0}) if n >= 2 else []:
                yield {"mode": "strided", "tokens": length, "window": n, "stride": stride,
                       "windows": strided(tokens, n, stride)}


if __name__ == "__main__":
    path = pathlib.Path(__file__).resolve().parents[1] / "fixtures/windows.json"
    path.write_text("[" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases()) + "]\n")
