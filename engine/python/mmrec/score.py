"""Scores a corpus on one machine or many: python -m mmrec.score INPUT... -o DIR (docs/clusters.md).

A document's figures are those of mmrec-ppl on the same text; its record has fields of mmrec-ppl's, of which `doc` counts within
the partition, and `name` is unique. `mmrec-ppl merge` does not take it.
"""

from __future__ import annotations

import collections
import json
import math
import sys
from typing import Any, Iterator, Optional

from . import _mmrec
from ._batch_program import Work, accepted, common_options, error_records, main as run, parser_of
from ._documents import load_models
from ._partitions import Document, Partition, Results, documents
from ._scorer import Scorer

#: Sums over no documents.
_NONE: dict[str, Any] = {"docs": 0, "refused": 0, "tokens": 0, "nll": 0.0, "m2": 0.0, "bytes": 0, "words": 0}


class _Score:
    """The work on a partition: a record for each document, sums for all."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._models = load_models(
            options["model"], options["device"], precision=options["precision"], threads=options["threads"]
        )
        self._tokenizer = _mmrec.Tokenizer.load(options["model"])
        self._results = Results(options["output"])
        self._scorer = Scorer(self._models, batch=options["batch"], threads=options["threads"])
        info = self._models[0].info
        self._results.agree("precision", info.precision)
        self._identity = {
            "mode": "full",
            "bos": "added" if self._tokenizer.adds_bos else "none",
            "model": f"{info.fingerprint:016x}",
            "tokenizer": f"{self._tokenizer.fingerprint:016x}",
            "version": _mmrec.__version__,
            "device": info.device,
        }

    def __call__(self, partition: Partition) -> None:
        sums = dict(_NONE)
        self._results.write(partition, self._records(partition, sums), sums)

    def _records(self, partition: Partition, sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        # Documents whose scores have not come, and rows that are refused between them.
        read: collections.deque[Document] = collections.deque()

        def texts() -> Iterator[str]:
            for document in accepted(documents(partition, self._options["field"]), self._options["on_error"]):
                read.append(document)
                if document.error is None:
                    yield document.text

        def refused() -> Iterator[dict[str, Any]]:
            while read and read[0].error is not None:
                sums["refused"] += 1
                yield from error_records(read.popleft(), self._options["on_error"])

        ids = self._tokenizer.encode_stream(texts(), threads=self._options["threads"])
        for doc, score in enumerate(self._scorer.score_stream(ids)):
            yield from refused()
            document = read.popleft()
            tokens, nll, m2 = _mmrec.document_sums(score)
            if not math.isfinite(nll):
                raise _mmrec.NumericError(f"{document.name}: nll is not finite (found {nll})")
            record: dict[str, Any] = {
                "doc": doc,
                **document.head,
                "tokens": tokens,
                "nll": nll,
                "nll_m2": m2,
                "ppl": _exp(nll / tokens) if tokens else None,
                "bytes": len(document.text.encode()),
                "words": _mmrec.count_words(document.text),
                **self._identity,
            }
            if self._options["logprobs"]:
                record["logprobs"] = [float(value) for value in score.logprobs]
            _add(sums, {**record, "docs": 1, "m2": m2, "refused": 0})
            yield record
        yield from refused()


def _add(sums: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds up; m2, the summed squared deviations from the mean loss, by Chan's formula."""
    n, k = sums["tokens"], more["tokens"]
    if n and k:
        sums["m2"] += (more["nll"] / k - sums["nll"] / n) ** 2 * n * k / (n + k)
    for name in _NONE:
        sums[name] += more[name]


def _exp(value: float) -> Optional[float]:
    return math.exp(value) if value < 700 else None


def _report(parts: list[dict[str, Any]]) -> str:
    total = dict(_NONE)
    for part in parts:
        _add(total, part)
    n, nll = total["tokens"], total["nll"]
    ppl = _exp(nll / n) if n else None
    error = math.sqrt(total["m2"] / (n - 1) / n) if n > 1 else None
    return json.dumps(
        {
            "docs": total["docs"],
            "refused": total["refused"],
            "tokens": n,
            "nll": nll,
            "ppl": ppl,
            "ppl_stderr": ppl * error if ppl is not None and error is not None else None,
            "bytes": total["bytes"],
            "words": total["words"],
            "bits_per_byte": nll / total["bytes"] / math.log(2) if total["bytes"] else None,
            "word_ppl": _exp(nll / total["words"]) if total["words"] else None,
            "byte_ppl": _exp(nll / total["bytes"]) if total["bytes"] else None,
        },
        indent=1,
    )


def make(options: dict[str, Any]) -> Work:
    return _Score(options)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = parser_of("mmrec.score", "Log-probs and perplexity of a corpus, on one machine or many.", "text")
    parser.add_argument("--logprobs", action="store_true", help="each token's log-prob in the records")
    args = parser.parse_args(arguments)
    return run("mmrec.score", parser, args, make, {**common_options(args), "logprobs": args.logprobs}, _report)


if __name__ == "__main__":
    from mmrec.score import main as run_main  # workers unpickle what is in the module, not in __main__

    sys.exit(run_main())
