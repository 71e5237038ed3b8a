#!/usr/bin/env python3
"""Adds tallies of tests/fuzz/run.sh to executions.tsv beside this, and brings the table in docs/robustness.md up to date.

Usage: record.py [--commit COMMIT] TALLY...     no TALLY: the table alone. COMMIT: that the fuzzers were built of (HEAD)
"""
import argparse
import csv
import datetime
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEDGER = ROOT / "tests/fuzz/executions.tsv"
PAGE = ROOT / "docs/robustness.md"
COLUMNS = ("date", "commit", "subject", "build", "executions", "edges", "of", "inputs", "findings")
BEGIN, END = "<!-- executions: scripts/fuzz --record -->\n", "<!-- end of executions -->\n"


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def table(rows):
    """Of each subject: executions of all runs, and how far the last run that says so got."""
    lines = ["| subject | executions, fast | under AddressSanitizer | edges reached | of those linked |",
             "|---|---:|---:|---:|---:|"]
    totals = {"fast": 0, "asan": 0}
    for subject in sorted({row["subject"] for row in rows}):
        of_subject = [row for row in rows if row["subject"] == subject]
        counts = {build: sum(int(row["executions"]) for row in of_subject if row["build"] == build) for build in totals}
        for build, count in counts.items():
            totals[build] += count
        reach = max((row for row in of_subject if row["build"] == "fast"), key=lambda row: int(row["edges"]), default=None)
        reached = (f"{int(reach['edges']):,}", f"{int(reach['of']):,}") if reach and int(reach["of"]) else ("", "")
        lines.append(f"| `{subject}` | {counts['fast']:,} | {counts['asan']:,} | {reached[0]} | {reached[1]} |")
    findings = sum(int(row["findings"]) for row in rows if row["build"] == "fast")
    dates = sorted({row["date"] for row in rows})
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    lines.append(f"| **all** | **{totals['fast']:,}** | **{totals['asan']:,}** | | |")
    lines += ["", f"**{sum(totals.values()):,} executions** from {dates[0]} to {dates[-1]}, of commits {commits}, with "
              f"{findings} inputs that failed."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--commit")
    parser.add_argument("tally", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    commit = arguments.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    rows = read(LEDGER) if LEDGER.exists() else []
    for path in arguments.tally:
        rows += [{"date": today, "commit": commit[:9], **{key: row[key] for key in COLUMNS[2:]}} for row in read(path)]
    with open(LEDGER, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + table(rows) + END, page, flags=re.S))


if __name__ == "__main__":
    main()
