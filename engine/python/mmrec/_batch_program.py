"""Shared by mmrec.score and mmrec.generate_many: command line, resuming, and exit codes as in docs/programs.md."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import sys
import time
from typing import Any, Callable, Iterator, Optional

from . import _cluster, _mmrec
from ._methods import load_models
from ._partitions import SPLITS, Document, InputError, Partition, RefusedError, Results, documents, plan
from ._results import bundled_model

Report = Callable[[list[dict[str, Any]]], str]


def parser_of(program: str, what: str, field: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=what, allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="JSONL, text or Parquet; a folder: what is in it")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="results; a run there is gone on with")
    parser.add_argument("-m", "--model", metavar="DIR", help="model folder (the bundled model)")
    parser.add_argument("--split-by", choices=SPLITS, help="how inputs are cut into documents (by their names)")
    parser.add_argument("--field", default=field, metavar="NAME", help=f"of a JSON line, or column ({field})")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip", "record"),
        default="stop",
        help="what a bad row does: ends the run (default), is left out, or has a record with its error",
    )
    parser.add_argument("--partition-mib", type=float, default=64, metavar="N", help="size of partitions (64)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda; without Ray cuda:N, cuda:all")
    parser.add_argument("--precision", default="auto", metavar="P", help="auto, fp32, fp16, bf16 or fp32-fma")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="sequences together at most")
    parser.add_argument("--ray-address", metavar="A", help="a cluster, or auto (one of this machine's own)")
    parser.add_argument("--no-ray", action="store_true", help="this process alone, as without Ray")
    parser.add_argument(
        "--cpus-per-worker", type=int, default=0, metavar="N", help="cores of a worker, and its threads"
    )
    return parser


class Work:
    """The work on a partition: records of its documents, in order, and their sums. Made from options in each worker."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.models = load_models(
            options["model"], options["device"], precision=options["precision"], threads=options["threads"]
        )
        self.tokenizer = _mmrec.Tokenizer.load(options["model"])
        self._results = Results(options["output"])
        self._results.agree("precision", self.models[0].info.precision)

    def __call__(self, partition: Partition) -> None:
        sums: dict[str, Any] = {"refused": 0}
        self._results.write(partition, self.records(partition, sums), sums)

    def records(self, partition: Partition, sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Records of the partition's documents. Adds to `sums` meanwhile."""
        raise NotImplementedError

    def documents(self, partition: Partition) -> Iterator[Document]:
        """The partition's documents, and bad rows unless they end the run. Raises InputError."""
        for document in documents(partition, self.options["field"]):
            if document.error is not None and self.options["on_error"] == "stop":
                raise InputError(document.error)
            yield document

    def refused(self, document: Document, sums: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The record of a bad row, if there is to be one."""
        sums["refused"] += 1
        if self.options["on_error"] == "record":
            yield {**document.head, "error": document.error}


def main(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    work: Callable[[dict[str, Any]], Work],
    own_options: dict[str, Any],
    report: Report,
) -> int:
    """Runs the program and returns its exit code. Each worker makes its `work` from options."""
    if not 1 <= args.partition_mib * (1 << 20) < math.inf:
        parser.error(f"--partition-mib: found {args.partition_mib}, expected a number of MiB, more than 0")
    if args.batch < 0 or args.cpus_per_worker < 0:
        parser.error("--batch, --cpus-per-worker: found a negative number")
    if args.no_ray and args.ray_address is not None:
        parser.error("--ray-address does not go with --no-ray")
    options = {
        "model": str(bundled_model()) if args.model is None else os.path.abspath(args.model),
        "output": os.path.abspath(args.output),
        **{name: getattr(args, name) for name in ("device", "precision", "batch", "field", "on_error")},
        **own_options,
    }
    try:
        out = sys.stdout
        with contextlib.redirect_stdout(_cluster.BriefOutput()):  # Ray's messages about workers that died
            result = _run(args, work, options, report)
            print(result, file=out)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as fault:  # noqa: BLE001 all of them are one line and an exit code
        code = _exit_code(fault, options["output"])
        if code is None:
            raise
        print(f"{parser.prog.split()[-1]}: {_line(fault)}", file=sys.stderr)
        return code


def _line(fault: Exception) -> str:
    if isinstance(fault, OSError) and fault.filename is not None and fault.strerror:
        return f"{os.fspath(fault.filename)}: {fault.strerror}"
    return str(fault).splitlines()[0] if str(fault) else type(fault).__name__


def _exit_code(fault: Exception, output: str) -> Optional[int]:
    if isinstance(fault, RefusedError):
        return 2
    if isinstance(fault, (InputError, _mmrec.ModelError)):
        return 3
    if isinstance(fault, MemoryError):
        return 4
    if isinstance(fault, OSError):
        is_output = str(fault.filename) == output or str(fault.filename).startswith(output + os.sep)
        return 5 if is_output or fault.filename is None else 3
    if isinstance(fault, _mmrec.NumericError):
        return 6
    if isinstance(fault, ValueError):
        return 2
    return 1 if isinstance(fault, (_cluster.ClusterError, RuntimeError)) else None


def _run(
    args: argparse.Namespace, work: Callable[[dict[str, Any]], Work], options: dict[str, Any], report: Report
) -> str:
    partitions = plan(args.inputs, args.split_by, int(args.partition_mib * (1 << 20)))
    results = Results(options["output"])
    results.begin(_identity(args, options))
    left = [partition for partition in partitions if not results.has(partition)]
    if len(left) < len(partitions):
        print(f"mmrec: {len(partitions) - len(left)} of {len(partitions)} partitions are there", file=sys.stderr)
    ray = None if args.no_ray or not left else _cluster.connect(args.ray_address)
    done, start = 0, time.monotonic()

    def on_done(_: Partition) -> None:
        nonlocal done
        done += 1
        print(f"mmrec: {done} of {len(left)} partitions, {time.monotonic() - start:.0f} s", file=sys.stderr)

    if ray is not None:
        device, cpus, gpus = _workers(ray, args)
        make = functools.partial(work, {**options, "device": device, "threads": 0 if gpus else cpus})
        _cluster.run_on_ray(ray, make, left, cpus, gpus, on_done)
    elif left:
        work_here = work({**options, "threads": args.cpus_per_worker})
        for partition in left:
            work_here(partition)
            on_done(partition)
    sums = [results.sums(partition) for partition in partitions]
    if refused := sum(part["refused"] for part in sums):
        print(f"mmrec: {refused} rows were refused", file=sys.stderr)
    return report(sums)


def _workers(ray: Any, args: argparse.Namespace) -> tuple[str, int, int]:
    """The device of a worker on Ray, its cores and its GPUs."""
    gpus = args.device.startswith("cuda") or (
        args.device == "auto" and "cuda" in _mmrec.backends and ray.cluster_resources().get("GPU", 0) >= 1
    )
    if args.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: found {args.device}, expected auto, cpu or cuda, as Ray hands GPUs out")
    least_cpus = min((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)
    cpus = args.cpus_per_worker or (1 if gpus else max(1, min(8, int(least_cpus))))
    return ("cuda", cpus, 1) if gpus else ("cpu", cpus, 0)


def _identity(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """The properties that all partitions of a folder share. The device may change, the precision may not. Workers check
    the precision that "auto" gave."""
    info = load_models(options["model"], "cpu", on_warning=lambda _: None)[0].info
    tokenizer = _mmrec.Tokenizer.load(options["model"])
    inputs = sorted({(p.path, p.size) for p in plan(args.inputs, args.split_by, 1 << 62)})
    kept = {name: value for name, value in options.items() if name not in ("model", "device", "batch", "output")}
    return {
        "model": f"{info.fingerprint:016x}",
        "tokenizer": f"{tokenizer.fingerprint:016x}",
        "version": _mmrec.__version__,
        "inputs": [[path, size, os.stat(path).st_mtime_ns] for path, size in inputs],
        "split_by": args.split_by,
        "partition_mib": args.partition_mib,
        **kept,
    }
