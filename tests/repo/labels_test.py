#!/usr/bin/env python3
"""Guards against passing by running nothing: every label has its tests, and none is disabled.

Usage: labels_test.py CTEST BUILD_DIR LABEL=MINIMUM...
"""
import json
import subprocess
import sys
import unittest

CTEST, BUILD_DIR, *WANTED = sys.argv[1:]


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

    def test_none_is_disabled(self):
        for test in self.tests:
            with self.subTest(test=test["name"]):
                self.assertFalse(self.properties(test).get("DISABLED", False))
                self.assertFalse(test["name"].endswith("_NOT_BUILT"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
