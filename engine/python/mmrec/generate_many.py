"""Continues many prompts on one machine or many: python -m mmrec.generate_many INPUT... -o DIR (docs/clusters.md).

The text depends only on prompt, options, seed and the prompt's place in its file: the byte at which its line begins, or
its row.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, Iterator, Optional

from . import _mmrec
from ._batch_program import Work, main as run, parser_of
from ._generator import Generator
from ._methods import blocks_of
from ._partitions import Document, Partition

#: Prompts of a partition that are in work or wait for their turn, at least.
_BLOCK = 1 << 10
_SUMS = ("prompts", "refused", "prompt_tokens", "tokens", "errors")


class _Generate(Work):
    """A record for each prompt."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._generator = Generator(self.models, self.tokenizer, slots=options["batch"], threads=options["threads"])

    def records(self, partition: Partition, sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sums.update(dict.fromkeys(_SUMS, 0))
        most = max(_BLOCK, 4 * self._generator.slots)
        for block in blocks_of(self.documents(partition), most=most):
            yield from self._generate(block, sums)

    def _generate(self, block: list[Document], sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found: list[Any] = [None] * len(block)
        prompts = self.tokenizer.encode_batch((one.text for one in block), threads=self.options["threads"])
        for index, (document, ids) in enumerate(zip(block, prompts)):
            if document.error is None:
                receive = functools.partial(found.__setitem__, index)
                self._generator.submit(ids, on_finish=receive, sequence=document.place, **self.options["generate"])
        self._generator.run()
        for document, ids, result in zip(block, prompts, found):
            if document.error is not None:
                yield from self.refused(document, sums)
                continue
            record = {**document.head, "text": result.text, "finish_reason": result.finish_reason}
            record["prompt_tokens"] = len(ids)
            record["tokens"] = result.tokens.tolist()
            if result.error:
                record["error"] = result.error
            sums["prompts"] += 1
            sums["prompt_tokens"] += len(ids)
            sums["tokens"] += len(result.tokens)
            sums["errors"] += bool(result.error)
            yield record


def _report(parts: list[dict[str, Any]]) -> str:
    return json.dumps({name: sum(part[name] for part in parts) for name in _SUMS}, indent=1)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = parser_of("mmrec.generate_many", "Continues many prompts, on one machine or many.", "prompt")
    parser.add_argument("-n", "--max-tokens", type=int, default=256, metavar="N", help="tokens to draw at most (256)")
    sampler = [(name, default, text) for name, default, _, text in _mmrec.sampler_options if text is not None]
    for name, default, text in sampler:
        flags = ["--" + name.replace("_", "-"), *(["-s"] if name == "seed" else [])]
        metavar = "N" if isinstance(default, int) else "X"
        if name == "seed":
            text = "random seed (0)"
        parser.add_argument(*flags, dest=name, type=type(default), default=default, metavar=metavar, help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    args = parser.parse_args(arguments)
    names = ("max_tokens", *(name for name, _, _ in sampler), "stop")
    generate = {**{name: getattr(args, name) for name in names}, "logprobs": False}
    return run(parser, args, _Generate, {"generate": generate}, _report)


if __name__ == "__main__":
    from mmrec.generate_many import main as run_main  # workers unpickle from the module, not from __main__

    sys.exit(run_main())
