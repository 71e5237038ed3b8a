#!/usr/bin/env python3
"""Guards against passing by running nothing: every label has its tests, every case of the sources runs, none is disabled.

Usage: labels_test.py CTEST BUILD_DIR LABEL=MINIMUM...
"""
import json
import pathlib
import re
import subprocess
import sys
import unittest

CTEST, BUILD_DIR, *WANTED = sys.argv[1:]
TESTS = pathlib.Path(__file__).resolve().parents[1]
CASE = re.compile(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST)\((\w+), (\w+)\)", re.MULTILINE)


class LabelsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        listing = subprocess.run([CTEST, "--test-dir", BUILD_DIR, "--show-only=json-v1"], check=True, capture_output=True)
        cls.tests = json.loads(listing.stdout)["tests"]

    def properties(self, test):
        return {p["name"]: p["value"] for p in test.get("properties", [])}

    def test_every_label_has_its_tests(self):
        counts = {}
        for test in self.tests:
            for label in self.properties(test).get("LABELS", ["none"]):
                counts[label] = counts.get(label, 0) + 1
        for wanted in WANTED:
            label, minimum = wanted.split("=")
            with self.subTest(label=label):
                self.assertGreaterEqual(counts.pop(label, 0), int(minimum))
        self.assertEqual(counts, {}, "labels that this test does not know")

    def test_every_case_of_the_sources_runs(self):
        """A parameterised or typed suite may be instantiated with nothing, and a file may belong to no program."""
        # [instance/]Suite[/type].Case[/parameter]
        names = [re.match(r"(?:emulated\.)?([^.]*)\.(\w+)", test["name"]) for test in self.tests]
        run = {(suite, name[2]) for name in names if name for suite in name[1].split("/")}
        labels = {wanted.split("=")[0] for wanted in WANTED}
        for source in sorted([*TESTS.rglob("*.cpp"), *TESTS.rglob("*.h")]):
            layer = "emulated" if "cuda" in source.parts else source.relative_to(TESTS).parts[0]
            if layer not in labels:  # which this build leaves out
                continue
            for case in CASE.findall(source.read_text(encoding="utf-8")):
                with self.subTest(source=str(source.relative_to(TESTS)), case=".".join(case)):
                    self.assertIn(case, run)

    def test_none_is_disabled(self):
        for test in self.tests:
            with self.subTest(test=test["name"]):
                self.assertFalse(self.properties(test).get("DISABLED", False))
                self.assertFalse(test["name"].endswith("_NOT_BUILT"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
