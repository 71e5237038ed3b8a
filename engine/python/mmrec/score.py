"""Scores a corpus on one machine or many: python -m mmrec.score INPUT... -o DIR (docs/clusters.md).

A document's figures are those of mmrec-ppl on the same text. Its record has the fields of mmrec-ppl: `doc` counts
within the partition, and `name` is unique. `mmrec-ppl merge` does not take these records.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import sys
from typing import Any, Iterator, Optional

from . import _mmrec
from ._batch_program import Work, main as run, parser_of
from ._methods import Scorer
from ._partitions import Document, Partition

#: Sums of a partition: the arguments of PerplexityAccumulator.add_sums.
_SUMS = ("docs", "tokens", "nll", "nll_m2", "bytes", "words")


class _Score(Work):
    """A record for each document."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._scorer = Scorer(self.models, batch=options["batch"], threads=options["threads"])
        info = self.models[0].info
        self._identity = {
            "mode": "full",
            "bos": "added" if self.tokenizer.adds_bos else "none",
            "model": f"{info.fingerprint:016x}",
            "tokenizer": f"{self.tokenizer.fingerprint:016x}",
            "version": _mmrec.__version__,
            "device": info.device,
        }

    def records(self, partition: Partition, sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        accumulator = _mmrec.PerplexityAccumulator()
        # Documents that wait for their scores, and bad rows between them.
        read: collections.deque[Document] = collections.deque()

        def texts() -> Iterator[str]:
            for document in self.documents(partition):
                read.append(document)
                if document.error is None:
                    yield document.text

        def refused() -> Iterator[dict[str, Any]]:
            while read and read[0].error is not None:
                yield from self.refused(read.popleft(), sums)

        ids = self.tokenizer.encode_stream(texts(), threads=self.options["threads"])
        for doc, score in enumerate(self._scorer.score_stream(ids)):
            yield from refused()
            document = read.popleft()
            one = _mmrec.PerplexityAccumulator()
            one.add(score, len(document.text.encode()), _mmrec.count_words(document.text))
            found = one.summary()
            if not math.isfinite(found.nll):
                raise _mmrec.NumericError(f"{document.name}: nll is not finite (found {found.nll})")
            record: dict[str, Any] = {
                "doc": doc,
                **document.head,
                "tokens": found.tokens,
                "nll": found.nll,
                "nll_m2": found.nll_m2,
                "ppl": _number(found.ppl),
                "bytes": found.bytes,
                "words": found.words,
                **self._identity,
            }
            if self.options["logprobs"]:
                record["logprobs"] = [float(value) for value in score.logprobs]
            accumulator.add_sums(*(getattr(found, name) for name in _SUMS))
            yield record
        yield from refused()
        total = accumulator.summary()
        sums.update({name: getattr(total, name) for name in _SUMS})


def _number(value: float) -> Optional[float]:
    """JSON has neither NaN nor infinities."""
    return value if math.isfinite(value) else None


def _report(parts: list[dict[str, Any]]) -> str:
    sums = _mmrec.PerplexityAccumulator()
    for part in parts:
        sums.add_sums(*(part[name] for name in _SUMS))
    total = sums.summary()
    figures = {**dataclasses.asdict(total), "refused": sum(part["refused"] for part in parts)}
    names = "docs refused tokens nll ppl ppl_stderr bytes words bits_per_byte word_ppl byte_ppl".split()
    return json.dumps({name: _number(figures[name]) for name in names}, indent=1)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = parser_of("mmrec.score", "Log-probs and perplexity of a corpus, on one machine or many.", "text")
    parser.add_argument("--logprobs", action="store_true", help="each token's log-prob in the records")
    args = parser.parse_args(arguments)
    return run(parser, args, _Score, {"logprobs": args.logprobs}, _report)


if __name__ == "__main__":
    from mmrec.score import main as run_main  # workers unpickle from the module, not from __main__

    sys.exit(run_main())
