#!/usr/bin/env python3
"""The shared library shows the symbols of exported_symbols.txt and no others: its binary interface changes on purpose.

Usage: exported_symbols_test.py NM READELF SHARED ARCHIVE [--update]     --update writes the list anew
"""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = pathlib.Path(__file__).resolve().with_name("exported_symbols.txt")
NM, READELF, SHARED, ARCHIVE = sys.argv[1:5]
HEAD = """# What libmmrec.so exports, demangled and sorted (exported_symbols_test.py compares; --update writes it anew).
# Until 1.0 a minor version may change or drop lines; a patch version only adds some.
"""


def exported():
    """Demangled names, without versions; both constructors of the Itanium ABI are one line."""
    listing = subprocess.run([NM, "--dynamic", "--defined-only", "--demangle", "--format=posix", SHARED], check=True,
                             capture_output=True, text=True).stdout
    names = set()
    for line in listing.splitlines():
        name, kind = line.rsplit(" ", 3)[0], line.rsplit(" ", 3)[1]
        if kind == "A":  # the version itself
            continue
        if not re.search(r"::k[A-Z]\w*$", name.split("@")[0]):  # a constant of a header, there if not optimised away
            names.add(name.split("@")[0].replace("> >", ">>"))  # demanglers differ in that space
    return names


def visible_in_archive():
    """Mangled names that an archive's objects define for everybody."""
    listing = subprocess.run([READELF, "--syms", "--wide", ARCHIVE], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[7] for row in rows
            if len(row) == 8 and row[4] in {"GLOBAL", "WEAK"} and row[5] == "DEFAULT" and row[6] != "UND"}


class ExportedSymbolsTest(unittest.TestCase):
    maxDiff = None

    def test_the_list_is_what_the_library_exports(self):
        listed = {line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
        found = exported()
        update = f"if meant, run: {' '.join(sys.argv[:5])} --update"
        self.assertEqual(sorted(found - listed), [], f"exported but not listed; {update}")
        self.assertEqual(sorted(listed - found), [], f"listed but no longer exported, which breaks programs; {update}")

    def test_nothing_internal_is_exported(self):
        found = exported()
        self.assertGreater(len(found), 50)
        for name in found:
            with self.subTest(symbol=name):
                plain = name
                for prefix in ["typeinfo for ", "typeinfo name for ", "vtable for "]:
                    plain = plain.removeprefix(prefix)
                self.assertRegex(plain, r"^mmrec::\w+(\[abi:cxx11\])?(::|\(|$)")
                self.assertNotRegex(plain, r"^mmrec::(engine|models|kernels|apps)::|::Impl::")

    def test_what_headers_declare_is_marked(self):
        """Classes with members to link, and functions that are not inline: unmarked they do not link with the library."""
        headers = [h for layer in ["engine", "models", "kernels"] for h in (ROOT / layer / "include/mmrec").glob("*.h*")]
        self.assertGreater(len(headers), 10)
        for header in headers:
            for number, line in enumerate(header.read_text(encoding="utf-8").splitlines(), 1):
                with self.subTest(header=header.name, line=number):
                    self.assertNotRegex(line, r"^class (?!MMREC_EXPORT)\w+( final)?( :.*)? \{")
                    self.assertNotRegex(line, r"^(?=\w)(?!MMREC_EXPORT|constexpr |inline |template)[\w:<>*&, ]+ \*?&?\w+\(")

    def test_the_library_calls_nothing_that_reads_the_environment_prints_or_ends_the_process(self):
        symbols = subprocess.run([NM, SHARED], check=True, capture_output=True, text=True).stdout
        if "__asan" in symbols or "__tsan" in symbols or "cudaMalloc" in symbols:
            self.skipTest("a sanitizer's calls, or those of the CUDA runtime, are the library's too")
        called = {line.split()[-1].split("@")[0] for line in symbols.splitlines() if line.split()[-2] == "U"}
        self.assertIn("malloc" if "malloc" in called else "_Znwm", called)
        self.assertEqual(called & {"getenv", "secure_getenv", "environ", "__environ", "setenv", "putenv", "printf", "puts", "putchar",
                                   "fprintf", "fputs", "fwrite", "perror", "__printf_chk", "__fprintf_chk", "stdout", "stderr", "exit",
                                   "_exit", "quick_exit", "abort", "setlocale", "uselocale", "signal", "sigaction", "atexit", "_ZSt4cout",
                                   "_ZSt4cerr", "_ZSt4clog"}, set())

    def test_the_archive_hides_what_is_internal_too(self):
        """So that a shared library of somebody else, linked with the archive, does not show it."""
        visible = visible_in_archive()
        self.assertGreater(len(visible), 50)
        internal = r"^_ZN?K?N?5mmrec(6engine|6models|7kernels)"
        self.assertEqual([name for name in sorted(visible) if re.match(internal, name)], [])


if __name__ == "__main__":
    if "--update" in sys.argv:
        LIST.write_text(HEAD + "".join(name + "\n" for name in sorted(exported())), encoding="utf-8")
    else:
        unittest.main(argv=sys.argv[:1])
