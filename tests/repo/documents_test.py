#!/usr/bin/env python3
"""What the documents say stays true: links lead somewhere, paths exist, options are real, versions agree.

Usage: documents_test.py [PROGRAM...]     programs whose help is compared with the README's command lines
"""
import os
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = {pathlib.Path(p).name: p for p in sys.argv[1:]}
BINARY = {".safetensors", ".model", ".pt", ".msgpack", ".png", ".bin", ".gz"}
SOURCE = {".h", ".cpp", ".inl", ".cu", ".cuh", ".py", ".cmake", ".txt"}


def repository_files():
    """Tracked and new files; without git (a source archive) everything but build folders."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                 check=True, capture_output=True).stdout.decode()
        files = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = []
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [f for f in folders if f not in {".git", "__pycache__"} and not f.startswith("build")]
            files += [pathlib.Path(folder) / name for name in names]
    return [f for f in files if f.is_file()]


FILES = repository_files()
DOCUMENTS = [f for f in FILES if f.suffix == ".md" and "fixtures" not in f.parts]


def text_of(path):
    return path.read_text(encoding="utf-8", errors="replace")


def fenced(text):
    """(language, body) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def help_of(program):
    """The longest help that a program has."""
    page = subprocess.run([program, "--help"], check=True, capture_output=True).stdout.decode()
    if "--help-all" not in page:
        return page
    return subprocess.run([program, "--help-all"], check=True, capture_output=True).stdout.decode()


def anchors(text):
    """GitHub's anchors of a document's headings."""
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


class DocumentsTest(unittest.TestCase):
    def test_every_row_of_the_comparison_names_tests_that_are_there(self):
        tests = set()
        for file in FILES:
            if file.suffix in {".cpp", ".h"} and "tests" in file.parts:
                tests |= {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", text_of(file), re.MULTILINE)}
        rows = [line for line in text_of(ROOT / "docs" / "comparison.md").splitlines() if line.startswith("| ") and not line.startswith("| |")]
        self.assertGreater(len(rows), 40)
        for row in rows:
            named = re.findall(r"`(\w+\.\w+)`", row.rstrip("| ").rsplit(" | ", 1)[1])
            self.assertTrue(named, f"no test: {row}")
            for test in named:
                self.assertIn(test, tests, row)

    def test_the_documents_are_there(self):
        names = {str(d.relative_to(ROOT)) for d in DOCUMENTS}
        for name in ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/numerics.md",
                     "docs/performance.md", "docs/robustness.md"]:
            self.assertIn(name, names)

    def test_links_lead_somewhere(self):
        for document in DOCUMENTS:
            for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                there = (document.parent / path).resolve() if path else document
                with self.subTest(document=document.name, link=target):
                    self.assertTrue(there.exists())
                    if anchor:
                        self.assertIn(anchor, list(anchors(text_of(there))))

    def test_paths_named_exist(self):
        top = {f.relative_to(ROOT).parts[0] for f in FILES if len(f.relative_to(ROOT).parts) > 1}
        self.assertEqual([(document.name, name) for document in DOCUMENTS
                          for name in re.findall(r"`([\w.\-]+/[\w./\-]*)`", text_of(document))
                          if name.split("/")[0] in top and not (ROOT / name).exists()], [])

    def test_comments_name_documents_that_exist(self):
        self.assertEqual([(str(path), name) for path in FILES if path.suffix in SOURCE and "fixtures" not in path.parts
                          for name in re.findall(r"\bdocs/[\w\-]+\.md", text_of(path)) if not (ROOT / name).is_file()], [])

    def test_scripts_are_executable_and_named_in_the_readme(self):
        readme = text_of(ROOT / "README.md")
        for name in ["scripts/quickstart", "scripts/test"]:
            self.assertIn(name, readme)
        for script in [*(f for f in FILES if f.parent == ROOT / "scripts"), ROOT / ".ci/run"]:
            with self.subTest(script=script.name):
                self.assertTrue(os.access(script, os.X_OK))

    def test_command_lines_use_options_that_exist(self):
        seen = 0
        for document in DOCUMENTS:
            for language, body in fenced(text_of(document)):
                if language not in {"sh", "console", "bash"}:
                    continue
                for line in body.replace("\\\n", " ").splitlines():
                    for command in line.split("|"):
                        words = command.split()
                        programs = [w for w in words if pathlib.PurePosixPath(w).name in PROGRAMS]
                        if not programs:
                            continue
                        name = pathlib.PurePosixPath(programs[0]).name
                        help_text = help_of(PROGRAMS[name])
                        for option in re.findall(r"(?<!\S)(--[a-z][\w\-]*|-[a-zA-Z])(?=[\s=]|$)", command):
                            seen += 1
                            with self.subTest(document=document.name, command=command.strip(), option=option):
                                self.assertRegex(help_text, rf"(?<![\w\-]){option}(?![\w\-])")
        if PROGRAMS:
            self.assertGreater(seen, 0)

    def test_the_version_is_one(self):
        version = re.search(r"project\(mmrec VERSION ([\d.]+)", text_of(ROOT / "CMakeLists.txt")).group(1)
        self.assertEqual(re.findall(r"^## \[([\d.]+)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)[0], version)

    def test_no_file_names_a_path_of_the_machine_it_was_written_on(self):
        personal = re.compile(r"(?<![\w.])/(?:home|work|Users|root)/\w|\.\./shared\b")
        self.assertEqual([str(path) for path in FILES if path.suffix not in BINARY and personal.search(text_of(path))], [])

    def test_the_repository_stays_small(self):
        self.assertLess(sum(f.stat().st_size for f in FILES), 40 * 2**20)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
