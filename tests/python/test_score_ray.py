"""mmrec.score and mmrec.generate_many on Ray: workers and nodes that die or come, and a Ray of the command's own."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from conftest import records
from mmrec import _cluster
from mmrec._partitions import Partition

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
cluster_utils = pytest.importorskip("ray.cluster_utils")
import psutil  # noqa: E402 Ray brings it

os.environ.setdefault("RAY_worker_niceness", "0")  # else what a busy machine does besides starves workers of their time

DOCUMENTS = 160
TEXT = "Once upon a time there were {} dogs. They ran to the park and played with a red ball. " * 4


def run(module, *arguments, environment=None):
    command = [sys.executable, "-m", f"mmrec.{module}", *map(str, arguments), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process):
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    strange = [line for line in errors.splitlines() if not line.startswith("mmrec: ")]
    assert not strange, "stderr has what is not ours"
    return out, errors


def corpus(folder, documents):
    path = folder / "corpus.jsonl"
    texts = (TEXT.replace("{}", str(i)) for i in range(documents))
    path.write_text("".join(json.dumps({"text": text, "prompt": text}) + "\n" for text in texts))
    return path


def by_name(folder):
    found = records(folder)
    assert len({record["name"] for record in found}) == len(found)
    return {record["name"]: record for record in found}


def writers(out):
    """Process ids of the actors of this test's cluster that are amid a partition: they have its file open."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has gone
            is_worker = "_Worker)" in " ".join(process.cmdline())
            if is_worker and any(file.path.startswith(str(out)) for file in process.open_files()):
                found.append(process.pid)
    return found


def wait_for(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def cluster():
    """Makes a cluster, with a head of these resources."""
    made = []

    def make(**head):
        made.append(cluster_utils.Cluster(initialize_head=True, head_node_args=head))
        return made[-1]

    yield make
    ray.shutdown()
    for each in made:
        each.shutdown()


def on_ray(cluster, partitions, act=lambda _: None, on_done=lambda _: None, gpus=0, hands=1):
    """Runs `act(begin)` for so many partitions, and what is not among the first two when as many workers are there.

    Gives the calls as (begin, process, node, GPUs), and what was raised.
    """
    log = pathlib.Path(cluster.head_node.get_session_dir_path()) / "calls.jsonl"

    def make():
        def work(partition):
            import ray

            node = ray.get_runtime_context().get_node_id()
            call = [partition.begin, os.getpid(), node, os.environ.get("CUDA_VISIBLE_DEVICES")]
            with open(log, "a") as file:
                file.write(json.dumps(call) + "\n")
            end = time.monotonic() + 200
            while partition.begin >= 2 and len({json.loads(line)[1] for line in open(log)}) < hands:
                assert time.monotonic() < end, "no other worker came"
                time.sleep(0.1)
            act(partition.begin)

        return work

    connected = _cluster.connect(cluster.address)
    parts = [Partition("/corpus", partitions, "line", i, i + 1) for i in range(partitions)]
    fault = None
    try:
        _cluster.run_on_ray(connected, make, parts, 1, gpus, on_done)
    except Exception as raised:
        fault = raised
    return [json.loads(line) for line in log.read_text().splitlines()], fault


def test_a_worker_and_a_node_are_killed(tmp_path, cluster):
    lines = corpus(tmp_path, DOCUMENTS)
    options = ["--partition-mib", "0.003", "--logprobs"]
    summary, _ = finish(run("score", lines, "-o", tmp_path / "alone", "--no-ray", *options))

    nodes = cluster(num_cpus=1)
    second = nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    out = tmp_path / "cluster"
    both = run("score", lines, "-o", out, "--ray-address", nodes.address, "--cpus-per-worker", 1, *options)
    wait_for(lambda: len(list(out.glob("part-*.jsonl"))) >= 2 and writers(out))
    os.kill(writers(out)[0], signal.SIGKILL)
    done = len(list(out.glob("part-*.jsonl")))
    wait_for(lambda: len(list(out.glob("part-*.jsonl"))) >= done + 1 or both.poll() is not None)
    assert both.poll() is None, "over before the node was killed: the corpus is too small"
    nodes.remove_node(second, allow_graceful=False)
    found, errors = finish(both)
    assert re.search(r"begun \d times: workers died", errors), errors
    assert json.loads(found)["tokens"] == json.loads(summary)["tokens"]
    assert json.loads(found)["nll"] == pytest.approx(json.loads(summary)["nll"], rel=1e-9)
    ours, theirs = by_name(out), by_name(tmp_path / "alone")
    assert len(theirs) == DOCUMENTS and ours.keys() == theirs.keys()
    for name, record in theirs.items():
        assert ours[name]["logprobs"] == pytest.approx(record["logprobs"], abs=1e-6)
    assert len(list(out.glob(".*"))) <= 2, "each of the two that were killed may leave the file it was writing"


def test_a_partition_that_kills_its_workers_ends_the_run(cluster):
    nodes = cluster(num_cpus=1)
    nodes.add_node(num_cpus=1)
    calls, fault = on_ray(nodes, 6, act=lambda begin: os._exit(1) if begin == 3 else None)
    assert isinstance(fault, _cluster.ClusterError)
    assert str(fault).startswith("/corpus: 5 workers died over part-") and "\n" not in str(fault)
    assert sum(begin == 3 for begin, *_ in calls) == _cluster.MOST_ATTEMPTS


def test_what_the_work_raises_ends_the_run_as_it_is(cluster):
    def act(begin):
        raise FileNotFoundError(2, "gone", "/corpus")

    _, fault = on_ray(cluster(num_cpus=1), 3, act)
    assert isinstance(fault, FileNotFoundError) and fault.filename == "/corpus"


def test_a_node_that_comes_late_has_work(cluster):
    nodes = cluster(num_cpus=1)
    seen = []

    def on_done(partition):
        seen.append(partition.begin)
        if len(seen) == 2:
            nodes.add_node(num_cpus=1)

    calls, fault = on_ray(nodes, 8, on_done=on_done, hands=2)
    assert fault is None and sorted(seen) == list(range(8))
    assert len(calls) == 8 and len({node for _, _, node, _ in calls}) == 2


def test_a_gpu_is_one_workers(cluster):
    calls, fault = on_ray(cluster(num_cpus=4, num_gpus=2), 8, gpus=1, hands=2)
    assert fault is None
    assert sorted(gpu for _, gpu in {(pid, gpu) for _, pid, _, gpu in calls}) == ["0", "1"]


@pytest.mark.parametrize("module,options", [("score", ["--logprobs"]), ("generate_many", ["-n", "5", "--seed", "3"])])
def test_a_ray_of_its_own_gives_what_one_process_gives(tmp_path, module, options):
    lines = corpus(tmp_path, 20)
    found = []
    for name, how in (("ray", ["--cpus-per-worker", 1]), ("alone", ["--no-ray"])):
        summary, errors = finish(run(module, lines, "-o", tmp_path / name, "--partition-mib", "0.003", *how, *options))
        found.append((by_name(tmp_path / name), json.loads(summary)))
        parts = len(list((tmp_path / name).glob("part-*.jsonl")))
        assert errors.count(" partitions, ") == parts > 1
    (ours, sums), (theirs, expected) = found
    assert ours.keys() == theirs.keys() and len(ours) == 20
    assert sums == pytest.approx(expected, rel=1e-9)
    for name, record in theirs.items():
        if module == "generate_many":
            assert ours[name] == record
        else:
            assert ours[name]["logprobs"] == pytest.approx(record["logprobs"], abs=1e-6)


def test_faults_of_the_input_are_a_line_and_an_exit_code(tmp_path):
    process = run("score", corpus(tmp_path, 3), "-o", tmp_path / "out", "--field", "body")
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 3 and out == "" and "expected a field 'body'" in errors and errors.count("\n") == 1


def test_a_cluster_that_asks_for_tokens(tmp_path):
    """A token in the home folder and the mode in the environment are all that it takes; without, a line says so."""
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*command, "get-auth-token", "--generate"], env=environment, check=True, capture_output=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = f"--head --port={port} --node-ip-address=127.0.0.1 --num-cpus=1 --include-dashboard=false --block".split()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "start", *options], env=environment, **quiet) as head:
        try:
            lines = corpus(tmp_path, 2)
            score = ["score", lines, "-o", tmp_path / "out", "--ray-address", f"127.0.0.1:{port}"]
            wait_for(lambda: listens(port))
            without = {name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}
            refused = run(*score, environment=without)
            _, errors = refused.communicate(timeout=200)
            assert refused.returncode == 1
            assert re.search(
                rf"^mmrec.score: --ray-address 127.0.0.1:{port}: .*RAY_AUTH_MODE=token$", errors, re.MULTILINE
            )
            out, _ = finish(run(*score, environment=environment))
            assert json.loads(out)["docs"] == 2
        finally:
            head.terminate()


def listens(port):
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0
