"""mmrec.score on a Ray cluster of two nodes on this machine: workers and nodes that die lose and repeat nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

DOCUMENTS = 160


def run(*arguments):
    command = [sys.executable, "-m", "mmrec.score", *map(str, arguments), "--device", "cpu", "--logprobs"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def records(folder):
    found = [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]
    assert len({record["name"] for record in found}) == len(found)
    return {record["name"]: record for record in found}


def workers():
    """Process ids of the actors of this test's cluster, whose processes descend from this one."""
    lines = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    parents = {int(line.split()[0]): int(line.split()[1]) for line in lines}

    def is_ours(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in (int(line.split()[0]) for line in lines if "ray::_Worker" in line) if is_ours(pid)]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_worker_and_a_node_are_killed(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    text = "Once upon a time there were {} dogs. They ran to the park and played with a red ball. " * 4
    corpus.write_text("".join(json.dumps({"text": text.replace("{}", str(i))}) + "\n" for i in range(DOCUMENTS)))
    options = ["--partition-mib", "0.003"]
    alone = run(corpus, "-o", tmp_path / "alone", "--no-ray", *options)
    summary, errors = alone.communicate(timeout=300)
    assert alone.returncode == 0, errors

    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        out = tmp_path / "cluster"
        both = run(corpus, "-o", out, "--ray-address", cluster.address, "--cpus-per-worker", 1, *options)
        wait_for(lambda: len(list(out.glob("part-*.jsonl"))) >= 2 and workers())
        os.kill(workers()[0], signal.SIGKILL)
        done = len(list(out.glob("part-*.jsonl")))
        wait_for(lambda: len(list(out.glob("part-*.jsonl"))) >= done + 1 or both.poll() is not None)
        assert both.poll() is None, "over before the node was killed: the corpus is too small"
        cluster.remove_node(second, allow_graceful=False)
        found, errors = both.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert both.returncode == 0, errors
    assert "is given to another" in errors
    assert json.loads(found)["tokens"] == json.loads(summary)["tokens"]
    assert json.loads(found)["nll"] == pytest.approx(json.loads(summary)["nll"], rel=1e-9)
    ours, theirs = records(out), records(tmp_path / "alone")
    assert len(theirs) == DOCUMENTS and ours.keys() == theirs.keys()
    for name, record in theirs.items():
        assert ours[name]["logprobs"] == pytest.approx(record["logprobs"], abs=1e-6)
    assert len(list(out.glob(".*"))) <= 2, "each of the two that were killed may leave the file it was writing"
