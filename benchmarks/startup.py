"""What a command costs before it does anything: ``--help``, ``plan``, ``ls`` against bare Python.

Usage: startup.py [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import Row, report

ROOT = Path(__file__).parent.parent
LENGTHS = ROOT / "examples" / "lengths.jsonl"
BARE = ["-c", "pass"]


def seconds(words: list[str]) -> float:
    """Wall clock of one fresh process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - began


def main() -> None:
    """Every command alternates with bare Python; the figure is the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        plan = ["plan", "--workload", "dflash_model.workload:tiny", "--lengths", str(LENGTHS)]
        commands = {"help": ["--help"], "plan": plan, "ls": ["ls", "--store", store]}
        rows = []
        for name, words in commands.items():
            command = ["-m", "compilecache", *words]
            seconds(command)
            pairs = [(seconds(command), seconds(BARE)) for _ in range(arguments.rounds)]
            took = median(mine for mine, _ in pairs)
            ratio = median(mine / bare for mine, bare in pairs)
            rows.append(Row(f"startup_{name}", took, "s", "python -c pass", ratio))
    report("startup", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
