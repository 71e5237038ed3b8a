#!/usr/bin/env python3
"""Tests of the CUDA backend on a device that has too little memory: they fail with needed and free bytes, by no signal.

Usage: short_memory_test.py TEST_CUDA_EMULATED
"""
import os
import re
import subprocess
import sys
import unittest

PROGRAM = sys.argv[1]
MEGABYTE = 1 << 20
# A backend takes 8 MB, its scratch and its matrix library 64 MB more each, on first use.
SUITES = ["ScanTest/decay_fp32.HeadsStrides*", "ScansTest.LogSumExpOfSpecialValues", "LinearTest.SumsInSlices",
          "GatedSweepSm90.OneTileAndMore", "CudaGraphTest.*", "CudaF32/Laws.SessionsInTwoThreadsDoNotMeet/*",
          "CudaF32/Laws.CloneDivergesAlone/*", "CudaKernels.WorkGoesToTheCallersStream"]


class ShortMemoryTest(unittest.TestCase):
    def outputs_of_failed_tests(self, megabytes):
        environment = {**os.environ, "MMREC_CUDA_EMULATION_MEMORY": str(megabytes * MEGABYTE)}
        done = subprocess.run([PROGRAM, "--gtest_filter=" + ":".join(SUITES)], env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertGreaterEqual(done.returncode, 0, f"ended by signal {-done.returncode}:\n{done.stdout[-2000:]}")
        tests = re.findall(r"^\[ RUN      \] (\S+)\n(.*?)^\[ +(OK|FAILED|SKIPPED) ", done.stdout, re.MULTILINE | re.DOTALL)
        self.assertGreaterEqual(len(tests), len(SUITES), done.stdout)
        self.assertEqual(done.returncode, int(any(outcome == "FAILED" for *_, outcome in tests)))
        return {name: output for name, output, outcome in tests if outcome == "FAILED"}

    def check(self, megabytes, *wanted):
        failed = self.outputs_of_failed_tests(megabytes)
        for name, output in failed.items():
            self.assertRegex(output, r"needed \d+ .*free \d+", name)
        for name in wanted:
            self.assertTrue(any(name in test for test in failed), f"{name} with {megabytes} MB: failed are {list(failed)}")

    def test_too_little_for_a_backend(self):
        self.check(4, *(suite.rstrip("/*") for suite in SUITES))

    def test_too_little_for_two_backends(self):
        self.check(12, "CudaKernels")
        self.check(100, "SessionsInTwoThreadsDoNotMeet")

    def test_too_little_for_some(self):
        for megabytes in [8, 9, 32, 72, 73, 137]:
            self.check(megabytes)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
