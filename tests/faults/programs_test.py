#!/usr/bin/env python3
"""Faults, one at a time, in the programs: the n-th allocation, thread or call on a file fails, or is cut short.

Whatever fails, a program ends with a documented exit code and at most a line on stderr that says why, or with the
right results; files are the old or the new ones, whole, and nothing else is left behind. MMREC_FAULTS=all tries every fault.

Usage: programs_test.py FAULTS_LIBRARY MMREC_GENERATE MMREC_PPL MODEL_FOLDER
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

LIBRARY, GENERATE, PPL, MODEL = sys.argv[1:5]
MOST = None if os.environ.get("MMREC_FAULTS") == "all" else 12
# Of each kind the exit codes that docs/programs.md allows: 1 a prompt that cannot be read, 3 a file of the model's or a
# state, 4 memory, 5 what is written.
CODES = {"alloc": {0, 4}, "thread": {0}, "short": {0}, "eintr": {0},
         "eio": {0, 1, 3, 5}, "enospc": {0, 1, 3, 5}, "emfile": {0, 1, 3, 5}, "eacces": {0, 1, 3, 5}}
FOREVER = 1_000_000_000  # failures, one after another
# A program keeps some memory back for the first time that there is none; where there is none for a while, then, or ever
# again, it may find so where nothing can be thrown.
RUNS = {"alloc": (1, 2, 99, FOREVER), "thread": (1, FOREVER), "emfile": (1, FOREVER)}
OLD = b"what was there before"


class ProgramsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "prompt").write_text("hello world, hello world\n" * 3)

    def path(self, name):
        return str(self.folder / name)

    def run_with(self, fault, arguments, count=None):
        environment = {**os.environ, "LD_PRELOAD": LIBRARY, "MMREC_FAULT": fault}
        if count:
            environment["MMREC_FAULT_COUNT"] = count
        return subprocess.run(arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)

    def calls_of(self, kind, arguments):
        self.run_with(f"{kind}:0", arguments, self.path("count"))
        calls = int((self.folder / "count").read_text())
        (self.folder / "count").unlink()
        return calls

    def faults(self, arguments, prepare=lambda: None, runs=RUNS.get, last=()):
        """Runs with one fault each, of all kinds: (the run, what to say of it). `last`: kinds whose last calls are all tried."""
        tried = 0
        for kind, codes in CODES.items():
            for failures in runs(kind) or (1,):
                prepare()
                calls = self.calls_of(kind, arguments)
                numbers = range(1, calls + 1, 1 if MOST is None else max(1, calls // MOST))
                for nth in sorted({*numbers, *(range(max(1, calls - 14), calls + 1) if kind in last else ())}):
                    prepare()
                    done = self.run_with(f"{kind}:{nth}:{failures}", arguments)
                    tried += 1
                    what = f"{kind}:{nth}:{failures}: {done}"
                    self.assertIn(done.returncode, codes, what)
                    yield done, what
        print(f"{pathlib.Path(arguments[0]).name}: {tried} faults", file=sys.stderr)

    def sweep(self, arguments, written, same=lambda a, b: a == b):
        """`written`: files that the program writes; all are there before."""
        def prepare():
            for name in written:
                (self.folder / name).write_bytes(OLD)

        prepare()
        expected = self.run_with("none:0", arguments)
        self.assertEqual(expected.returncode, 0, expected.stderr)
        new = {name: (self.folder / name).read_bytes() for name in written}
        for done, what in self.faults(arguments, prepare):
            self.assertLessEqual(done.stderr.count(b"\n"), 2 if done.returncode == 0 else 1, what)
            if done.returncode == 0:
                self.assertTrue(same(done.stdout, expected.stdout), what)
            else:
                self.assertNotEqual(done.stderr, b"", what)
            for name in written:
                found = (self.folder / name).read_bytes()
                self.assertTrue(found == OLD and done.returncode != 0 or same(found, new[name]), f"{what}: {name}")
            self.assertLessEqual({path.name for path in self.folder.iterdir()}, {"prompt", *written}, what)

    def test_generate(self):
        self.sweep([GENERATE, "-m", MODEL, "--device", "cpu", "-t", "2", "-q", "-f", self.path("prompt"), "-n", "4", "-s", "1",
                    "-o", self.path("out"), "--state-out", self.path("state")], ["out", "state"])

    def test_ppl(self):
        def same(a, b):
            return a == b or a[:1] == b[:1] == b"{" and measures(a) == measures(b)

        def measures(text):
            return {key: value for key, value in json.loads(text).items() if isinstance(value, (int, float))
                    and "second" not in key and "time" not in key}

        self.sweep([PPL, "-m", MODEL, "--device", "cpu", "-t", "2", "-q", "--format", "csv", "-o", self.path("out"),
                    "--save-logprobs", self.path("logprobs"), self.path("prompt")], ["out", "logprobs"], same)

    def test_ppl_goes_on_after_a_fault(self):
        """Whatever failed, the next run with --resume completes the file."""
        out = self.folder / "out"
        arguments = [PPL, "-m", MODEL, "--device", "cpu", "-t", "1", "-q", "--split-by", "line", "--format", "jsonl", "--resume",
                     "-o", str(out), self.path("prompt")]
        self.assertEqual(self.run_with("none:0", arguments).returncode, 0)
        whole = out.read_bytes()
        for kind in ("enospc", "alloc"):
            out.unlink()
            calls = self.calls_of(kind, arguments)
            for nth in sorted({*range(1, calls + 1, max(1, calls // 8)), *range(max(1, calls - 8), calls + 1)}):
                out.unlink(missing_ok=True)
                done = self.run_with(f"{kind}:{nth}", arguments)
                again = self.run_with("none:0", arguments)
                self.assertEqual(again.returncode, 0, f"{kind}:{nth}: {done} {again}")
                self.assertEqual(out.read_bytes(), whole, f"{kind}:{nth}: {done}")

    def test_prefix_cache(self):
        """A state that cannot be read just now is not lost, and what it is for comes out all the same."""
        arguments = [GENERATE, "-m", MODEL, "--device", "cpu", "-t", "2", "-q", "-f", self.path("prompt"), "-n", "4", "-s", "1",
                     "--prefix-cache", self.path("cache")]
        expected = self.run_with("none:0", arguments)
        self.assertEqual(expected.returncode, 0, expected.stderr)

        def kept():
            return {path.name: path.read_bytes() for path in (self.folder / "cache").iterdir()}

        before = kept()
        self.assertTrue(before)
        runs = lambda kind: RUNS.get(kind, (1,) if kind in ("short", "eintr") else (1, FOREVER))
        for done, what in self.faults(arguments, runs=runs, last=("eio", "emfile")):  # the last calls are those on the cache
            self.assertTrue(done.returncode != 0 or done.stdout == expected.stdout, what)
            self.assertEqual(kept(), before, what)

    def test_a_line_without_memory_is_a_record(self):
        lines = [json.dumps({"id": i, "prompt": "hello world", "n": 2, "seed": i, "num_samples": 2}) for i in range(3)]
        (self.folder / "prompt").write_text("\n".join(lines))
        arguments = [GENERATE, "-m", MODEL, "--device", "cpu", "-t", "1", "-q", "--jsonl", self.path("prompt")]
        expected = self.run_with("alloc:0", arguments, self.path("count")).stdout.splitlines()
        calls = int((self.folder / "count").read_text())
        self.assertEqual(len(expected), 6)
        starved = 0
        for nth in range(calls // 2, calls, 1 if MOST is None else max(1, calls // 100)):
            done = self.run_with(f"alloc:{nth}:2", arguments)  # the first is served from memory that is kept back
            what = f"alloc:{nth}:2: {done}"
            self.assertIn(done.returncode, {0, 3, 4}, what)
            if done.returncode != 3:
                continue
            for line in set(done.stdout.splitlines()) - set(expected):
                self.assertEqual(json.loads(line)["error"], "out of memory", what)
                starved += 1
        self.assertGreater(starved, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
