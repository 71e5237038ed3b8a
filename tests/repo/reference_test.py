#!/usr/bin/env python3
"""Every public declaration is documented: scripts/docs makes the API reference and fails on what is not.

Skipped where doxygen is missing (scripts/install-deps --lint installs it).
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # the exit status that ctest takes for a skipped test


class ReferenceTest(unittest.TestCase):
    def test_the_reference_is_made_without_a_warning(self):
        with tempfile.TemporaryDirectory() as folder:
            made = subprocess.run([ROOT / "scripts/docs", folder], capture_output=True, text=True)
            self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
            self.assertEqual(made.stderr, "")
            pages = {page.name for page in pathlib.Path(folder, "html").glob("*.html")}
            for page in ["index.html", "classmmrec_1_1Session.html", "namespacemmrec.html"]:
                self.assertIn(page, pages)
            text = pathlib.Path(folder, "html/namespacemmrec.html").read_text(encoding="utf-8")
            for name in ["generate", "decay_scan", "version", "write_state_file"]:
                self.assertTrue(f">{name}</a>" in text, name)


if __name__ == "__main__":
    if shutil.which("doxygen") is None:
        print("skipped: doxygen is missing; scripts/install-deps --lint installs it")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1])
