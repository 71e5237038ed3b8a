"""Partitions worked off by actors of a Ray cluster, or by this process.

Actors are Ray's own and not a pool of Ray Data's. That one (2.60) gives a partition back to the very actor that had it: where
its node is gone for good the partition waits until other workers have nothing more to do and give up their place, and one
that kills its workers is tried without end.

What must stay true: a partition whose worker dies is given to another; workers are added while the cluster has room for
them; work on a partition can be repeated without harm.
"""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, Callable, Optional

from ._partitions import Partition

#: Workers that may die over one partition before it is taken to be the cause.
MOST_ATTEMPTS = 5


class ClusterError(Exception):
    """The cluster cannot do it, in one line."""


def connect(address: Optional[str]) -> Any:
    """Ray, connected to `address`, or to one of its own on this machine; None where it is not installed."""
    try:
        import ray
    except ImportError:
        if address is not None:
            raise ClusterError("--ray-address: Ray is not installed. Try: pip install 'ray[data]'") from None
        return None
    if not ray.is_initialized():
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as fault:
            raise ClusterError(f"--ray-address {address}: {str(fault).splitlines()[0]}") from fault
    return ray


def run_here(make: Callable[[], Callable[[Partition], None]], partitions: list[Partition]) -> None:
    """All of them in this process."""
    if partitions:
        work = make()
        for partition in partitions:
            work(partition)


def run_on_ray(
    ray: Any,
    make: Callable[[], Callable[[Partition], None]],
    partitions: list[Partition],
    cpus: float,
    gpus: float,
    on_done: Callable[[Partition], None],
) -> None:
    """All of them by as many workers of `cpus` and `gpus` each as there is room for, now or later.

    Raises ClusterError for a partition over which workers died again and again, and what the work itself raised.
    """
    actor_of = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_Worker)
    pending = collections.deque(partitions)
    attempts: collections.Counter[Partition] = collections.Counter()
    in_work: dict[Any, tuple[Any, Optional[Partition]]] = {}
    try:
        while pending or any(partition for _, partition in in_work.values()):
            while len(in_work) < min(_room(ray, cpus, gpus), len(pending) + _busy(in_work)):
                actor = actor_of.remote(make)
                in_work[actor.ready.remote()] = (actor, None)
            if not in_work:
                time.sleep(1)
                continue
            done, _ = ray.wait(list(in_work), timeout=1)
            for reference in done:
                actor, partition = in_work.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayTaskError as fault:
                    raise fault.cause if isinstance(getattr(fault, "cause", None), Exception) else fault from None
                except ray.exceptions.RayError as fault:
                    _give_back(partition, pending, attempts, fault)
                    continue
                if partition is not None:
                    on_done(partition)
                if pending:
                    following = pending.popleft()
                    in_work[actor.work.remote(following)] = (actor, following)
                else:
                    ray.kill(actor)
    finally:
        for actor, _ in in_work.values():
            ray.kill(actor)


def _give_back(
    partition: Optional[Partition],
    pending: collections.deque[Partition],
    attempts: collections.Counter[Partition],
    fault: Exception,
) -> None:
    if partition is None:
        return
    attempts[partition] += 1
    reason = (str(fault).splitlines() or ["no reason given"])[0]
    if attempts[partition] == MOST_ATTEMPTS:
        raise ClusterError(f"{partition.path}: {MOST_ATTEMPTS} workers died over {partition.name} ({reason})")
    print(f"mmrec: a worker died ({reason}); {partition.name} is given to another", file=sys.stderr)
    pending.appendleft(partition)


def _busy(in_work: dict[Any, tuple[Any, Optional[Partition]]]) -> int:
    return sum(1 for _, partition in in_work.values() if partition is not None)


def _room(ray: Any, cpus: float, gpus: float) -> int:
    """Workers that the nodes which are alive have room for."""
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            room += int(min(has.get("CPU", 0) / cpus, has.get("GPU", 0) / gpus if gpus else float("inf")))
    return room


class _Worker:
    """Holds the model for as long as there are partitions."""

    def __init__(self, make: Callable[[], Callable[[Partition], None]]) -> None:
        self._work = make()

    def ready(self) -> None:
        """Answers when the model is loaded."""

    def work(self, partition: Partition) -> None:
        self._work(partition)
