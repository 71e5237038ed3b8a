#!/usr/bin/env python3
"""Manual pages and completions have every option of the programs, and the programs that read them have nothing to say.

Usage: option_documents_test.py SHARE PROGRAM...     SHARE: the folder that the build writes
What is not installed of groff, zsh and fish is left out, with a word.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARE = pathlib.Path(sys.argv[1])
PROGRAMS = {pathlib.Path(p).name: p for p in sys.argv[2:]}
SUBCOMMANDS = {"mmrec-ppl": ["merge"]}


def options_of(program, *words):
    """Long options of a program's longest help."""
    text = subprocess.run([PROGRAMS[program], *words, "--help-all"], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))


def pages(kind):
    """(program, file) of each program."""
    where = {"man": "man/man1/{}.1", "bash": "bash-completion/completions/{}", "zsh": "zsh/site-functions/_{}",
             "fish": "fish/vendor_completions.d/{}.fish"}[kind]
    return [(program, SHARE / where.format(program)) for program in PROGRAMS]


def have(tool):
    if shutil.which(tool) is None:
        print(f"{tool} is not installed: not tried", file=sys.stderr)
        return False
    return True


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


class OptionDocumentsTest(unittest.TestCase):
    def test_every_option_is_in_every_document(self):
        for program in PROGRAMS:
            options = options_of(program)
            for word in SUBCOMMANDS.get(program, []):
                options |= options_of(program, word)
            self.assertGreaterEqual(options, {"help", "version"})
            for kind in ["man", "bash", "zsh", "fish"]:
                text = dict(pages(kind))[program].read_text(encoding="utf-8").replace("\\-", "-")
                for option in options:
                    pattern = rf"-l {option}(?![\w-])" if kind == "fish" else rf"--{option}(?![\w-])"
                    with self.subTest(program=program, kind=kind, option=option):
                        self.assertRegex(text, pattern)

    def test_manual_pages_are_formatted_without_a_warning(self):
        for program, page in pages("man"):
            text = page.read_text(encoding="utf-8")
            for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS", "SEE ALSO"]:
                self.assertIn(f"\n.SH {section}\n", text)
            if have("groff"):
                made = run("groff", "-ww", "-man", "-Tutf8", page)
                self.assertEqual(made.stderr, "", program)
                self.assertEqual(made.returncode, 0)
                self.assertIn(program, made.stdout)

    def test_exit_codes_are_those_of_the_programs_and_the_documents(self):
        header = (ROOT / "apps/common/cli.h").read_text(encoding="utf-8")
        codes = set(re.findall(r"^  k\w+ = (\d+)", header, re.MULTILINE)) | {"129", "143"}
        for document in ["docs/programs.md", "docs/embedding.md"]:
            text = (ROOT / document).read_text(encoding="utf-8")
            for code in codes:
                self.assertRegex(text, rf"(?<!\d){code}(?!\d)", document)
        for program, page in pages("man"):
            section = page.read_text(encoding="utf-8").split(".SH EXIT STATUS\n")[1].split(".SH ")[0]
            self.assertEqual(set(re.findall(r"\d+", " ".join(re.findall(r"\.TP\n(.*)\n", section)))), codes, program)

    def bash_answers(self, program, *words):
        """What bash offers for the last of `words`."""
        script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); ' \
                 '"$(complete -p "$1" | sed "s/.*-F \\([^ ]*\\) .*/\\1/")"; printf "%s\\n" "${COMPREPLY[@]}"'
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "text.txt").touch()
            pathlib.Path(folder, "model").mkdir()
            asked = run("bash", "-uc", script, "bash", dict(pages("bash"))[program], program, *words, cwd=folder)
        self.assertEqual(asked.stderr, "")
        return set(asked.stdout.split())

    def test_bash_answers(self):
        self.assertEqual(self.bash_answers("mmrec-generate", "--pre"),
                         {"--precision", "--prefill", "--prefix-cache", "--prefix-cache-mb", "--predict"})
        self.assertEqual(self.bash_answers("mmrec-generate", "--precision", ""),
                         {"auto", "fp32", "bf16", "fp16", "fp32-fma"})
        self.assertEqual(self.bash_answers("mmrec-generate", "-m", ""), {"model"})
        self.assertEqual(self.bash_answers("mmrec-generate", "-f", "te"), {"text.txt"})
        self.assertEqual(self.bash_answers("mmrec-generate", "-p", ""), set())
        self.assertEqual(self.bash_answers("mmrec-ppl", ""), {"merge", "text.txt", "model"})
        self.assertEqual(self.bash_answers("mmrec-ppl", "--mode", "s"), {"strided"})
        self.assertEqual(self.bash_answers("mmrec-ppl", "merge", "--format", ""), {"text", "json"})
        self.assertEqual(self.bash_answers("mmrec-ppl", "merge", "--o"), {"--output"})
        self.assertEqual(self.bash_answers("mmrec-bench", "--dec"), {"--decode", "--decode-batches"})

    def test_zsh_reads_its_scripts(self):
        for program, script in pages("zsh"):
            self.assertTrue(script.read_text(encoding="utf-8").startswith(f"#compdef {program}\n"))
            if have("zsh"):
                read = run("zsh", "-n", script)
                self.assertEqual((read.returncode, read.stderr), (0, ""), program)

    def test_fish_answers(self):
        if not have("fish"):
            return
        with tempfile.TemporaryDirectory() as home:
            for program, script in pages("fish"):
                asked = run("fish", "--no-config", "-c", f'source {script}; complete -C "{program} --versi"',
                            env={"HOME": home, "PATH": "/usr/bin:/bin"})
                self.assertEqual(asked.stdout.split("\t")[0], "--version")
            asked = run("fish", "--no-config", "-c", f'source {script.parent}/mmrec-ppl.fish; '
                        'complete -C "mmrec-ppl --mode "', env={"HOME": home, "PATH": "/usr/bin:/bin"})
            self.assertEqual({line.split("\t")[0] for line in asked.stdout.splitlines()},
                             {"full", "rolling", "strided", "llama"})

    def test_words_that_an_option_may_have_stand_in_its_help(self):
        for program, script in pages("fish"):
            page = run(PROGRAMS[program], "--help-all").stdout
            for words in re.findall(r" -x -a '([^'(]+)'", script.read_text(encoding="utf-8")):
                for word in words.split():
                    with self.subTest(program=program, word=word):
                        self.assertRegex(page, rf"(?<![\w-]){re.escape(word)}(?![\w-])")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
