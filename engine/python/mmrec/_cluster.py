"""Works on partitions in a pool of Ray Data's actors.

Ray restarts a worker that died and gives it its partition again, without end. So a worker counts in a ledger how often
a partition was begun, and refuses one that was begun too often: a partition that kills its workers ends the run.

Must stay true: a partition whose worker dies is begun again, a bounded number of times; workers are added while the
cluster has room for them; work on a partition can be repeated without harm.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import logging
import os
import pickle
import re
import socket
import sys
from typing import Any, Callable, Iterator, Optional

from ._partitions import Partition

Work = Callable[[Partition], None]

#: Workers that may die over one partition before it is taken to be the cause.
MOST_ATTEMPTS = 5


class ClusterError(Exception):
    """The cluster cannot do it, in one line."""


def connect(address: Optional[str]) -> Any:
    """Ray, connected to `address`, or to one of its own on this machine; None where it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError:
        if address is not None:
            raise ClusterError("--ray-address: Ray Data is not installed. Try: pip install 'ray[data]'") from None
        return None
    if not ray.is_initialized():
        if address is not None:  # Ray waits long for a cluster that is not there
            print(f"mmrec: connects to {address}", file=sys.stderr)
            _expect_listener(address)
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ writes to this process' stderr
        try:
            with _quiet():  # and says that it has been told so
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    include_dashboard=False,
                )
        except (ConnectionError, ValueError, RuntimeError) as fault:
            what = str(fault).splitlines()[0]
            # Ray does not say that the cluster asks for a token. It uses a token by itself if one was made before.
            if what.startswith("Failed to connect") and "RAY_AUTH_MODE" not in os.environ:
                what += ". If it asks for a token: RAY_AUTH_MODE=token"
            raise ClusterError(f"--ray-address {address}: {what}") from fault
    return ray


def _expect_listener(address: str) -> None:
    """Raises ClusterError where nothing listens: Ray itself asks for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return  # auto, or what Ray refuses
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as fault:
        raise ClusterError(f"--ray-address {address}: {fault}") from fault


class BriefOutput(io.TextIOBase):
    """Replaces stdout. Of Ray's messages about workers and nodes that died, it writes a line each to stderr."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            line = re.sub(r"\x1b\[\d+m", "", line)
            if line.startswith("(raylet"):  # the other lines are the end of Ray's logs
                print(f"mmrec: ray: {line.partition(') ')[2][:200]}", file=sys.stderr)
        return len(text)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a standard error, of Python and of other languages."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def run_on_ray(
    ray: Any,
    make: Callable[[], Work],
    partitions: list[Partition],
    cpus: float,
    gpus: float,
    on_done: Callable[[Partition], None],
) -> None:
    """Works on all partitions, by as many workers of `cpus` and `gpus` each as the cluster has room for, now or later.

    Raises ClusterError for a partition over which workers died again and again, and the exception of the work itself.
    """
    _configure(ray)
    node = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    ledger = ray.remote(num_cpus=0, scheduling_strategy=here)(_Ledger).remote()
    rows = [dataclasses.asdict(partition) for partition in partitions]
    outcomes = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        _Worker,
        fn_constructor_args=(make, ledger),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=len(rows), max_tasks_in_flight_per_actor=1),
        num_cpus=cpus,
        num_gpus=gpus,
    )
    try:
        # No prefetching: it would hold back each outcome until the next is there.
        for batch in outcomes.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
            outcome = _row(batch)
            begun, fault = outcome.pop("begun"), outcome.pop("fault")
            if fault:
                raise pickle.loads(fault)
            partition = Partition(**outcome)
            if begun > 1:
                print(f"mmrec: {partition.name} was begun {begun} times: workers died", file=sys.stderr)
            on_done(partition)
    except ray.exceptions.RayError as lost:
        raise ClusterError(f"Ray: {(str(lost).strip() or type(lost).__name__).splitlines()[-1]}") from lost


def _configure(ray: Any) -> None:
    for handler in list(logging.getLogger("ray.data").handlers):
        if handler.name == "console":
            logging.getLogger("ray.data").removeHandler(handler)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # one partition may take long
    # With a task in flight for each worker, no pool is more than busy: it grows while there is room, and never shrinks.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 0.01
    context.autoscaling_config.actor_pool_util_downscaling_threshold = 0.0


class _Ledger:
    """How often each partition has been begun."""

    def __init__(self) -> None:
        self._begun: collections.Counter[str] = collections.Counter()

    def begin(self, name: str) -> int:
        self._begun[name] += 1
        return self._begun[name]


class _Worker:
    """Holds the model for as long as there are partitions."""

    def __init__(self, make: Callable[[], Work], ledger: Any) -> None:
        self._make = make
        self._ledger = ledger
        self._work: Optional[Work] = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import ray

        partition = Partition(**_row(batch))
        begun, fault = 0, b""
        try:
            begun = ray.get(self._ledger.begin.remote(partition.name))
            if begun > MOST_ATTEMPTS:
                raise ClusterError(f"{partition.path}: {MOST_ATTEMPTS} workers died over {partition.name}")
            if self._work is None:  # here, where a model that kills its worker counts too
                self._work = self._make()
            self._work(partition)
        except Exception as raised:  # noqa: BLE001 the driver raises it
            fault = _packed(raised)
        return {**batch, "begun": [begun], "fault": [fault]}


def _row(batch: dict[str, Any]) -> dict[str, Any]:
    """Of a batch of one, as Python's types."""
    return {name: values.tolist()[0] for name, values in batch.items()}


def _packed(fault: Exception) -> bytes:
    try:
        packed = pickle.dumps(fault)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 classes that cannot be pickled raise anything
        packed = pickle.dumps(RuntimeError(f"{type(fault).__name__}: {fault}"))
    return packed
