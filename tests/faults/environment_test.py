#!/usr/bin/env python3
"""What the libraries behind a program look up in the environment is documented, and makes it print and write nothing more.

Usage: environment_test.py FAULTS_LIBRARY MMREC_PPL MODEL_FOLDER EMBEDDING_MD
"""
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

LIBRARY, PPL, MODEL, DOCUMENT = (os.path.abspath(path) for path in sys.argv[1:5])
# Of the documented variables what they would do if the libraries listened.
LOUD = {"VERBOSE": "2", "JIT_DUMP": "1", "JIT_PROFILE": "6", "MAX_CPU_ISA": "SSE41", "CPU_ISA_HINTS": "PREFER_YMM",
        "DEFAULT_FPMATH_MODE": "BF16", "PRIMITIVE_CACHE_CAPACITY": "0", "ITT_TASK_LEVEL": "2"}
ENVIRONMENT = {f"{prefix}_{name}": value for prefix in ("ONEDNN", "DNNL") for name, value in LOUD.items()}
ENVIRONMENT |= {"OMP_NUM_THREADS": "7", "OMP_DYNAMIC": "true", "OMP_DISPLAY_AFFINITY": "true", "OMP_PROC_BIND": "true",
                "OMP_WAIT_POLICY": "active", "OMP_MAX_ACTIVE_LEVELS": "4", "CUBLAS_LOGINFO_DBG": "1", "CUBLASLT_LOG_LEVEL": "5",
                "CUBLAS_LOGDEST_DBG": "stdout", "CUBLASLT_LOG_MASK": "31", "OCL_ICD_DEBUG": "15"}


def documented(mark=""):
    """The variables of the table's rows that say so, patterns among them."""
    text = pathlib.Path(DOCUMENT).read_text(encoding="utf-8")
    table = text.split("### What linked libraries", 1)[1].split("\n## ", 1)[0]
    return [name for row in table.splitlines() if row.startswith("| ") and mark in row
            for name in re.findall(r"`([A-Z_0-9*]+)`", row)]


class EnvironmentTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text").write_text("hello world, " * 200)  # whole tiles of rows, which oneDNN multiplies

    def score(self, environment):
        with subprocess.Popen([PPL, MODEL, "text", "--per-token", "--format", "jsonl", "-q", "--device", "cpu"],
                              env={**os.environ, **environment}, cwd=self.folder, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertFalse(os.path.exists(f"/tmp/perf-{process.pid}.map"))
        return re.sub(rb'"timings":\{[^}]*\}', b"", out), err

    def test_every_variable_that_is_looked_up_is_documented(self):
        self.score({"LD_PRELOAD": LIBRARY, "MMREC_FAULT_READS": str(self.folder / "reads")})
        reads = {name for name in (self.folder / "reads").read_text().split() if not name.startswith("MMREC_")}
        self.assertIn("ONEDNN_PRIMITIVE_CACHE_CAPACITY", reads)  # oneDNN was at work
        reads = {re.sub("^DNNL_", "ONEDNN_", name) for name in reads}
        known, unread = documented(), documented("not read")
        self.assertGreater(len(unread), 4)
        self.assertEqual({name for name in reads if not any(fnmatch.fnmatchcase(name, k) for k in known)}, set())
        self.assertEqual(reads & set(unread), set())

    def test_no_variable_prints_writes_or_changes_a_result(self):
        expected = self.score({})
        self.assertEqual(expected[1], b"")
        self.assertEqual(self.score({**ENVIRONMENT, "HOME": str(self.folder), "JITDUMPDIR": str(self.folder),
                                     "CUBLASLT_LOG_FILE": str(self.folder / "log")}), expected)
        self.assertEqual(os.listdir(self.folder), ["text"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
