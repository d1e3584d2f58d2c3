"""The main job in small: a cold warm-up, the cache deleted, a fresh process restored and trained.

``make demo`` runs it on any CPU in a few minutes and leaves ``build/demo/report.json``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent
BUILD = Path("build/demo")
LENGTHS = EXAMPLES / "lengths.jsonl"
TARGET_SHARE = 0.35
"""The warm start must cost at most this share of the cold one."""


def compilecache(*words: str) -> None:
    """Runs one command as a user would."""
    print(f"\n$ compilecache {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "compilecache", *words], check=True)


def train(title: str, root: Path) -> dict[str, object]:
    """Runs the trainer in a fresh process."""
    print(f"\n{title}", flush=True)
    command = [sys.executable, str(EXAMPLES / "train_threads.py")]
    command += ["--plan", str(BUILD / "plan.yaml"), "--lengths", str(LENGTHS)]
    command += ["--store", str(BUILD / "store"), "--root", str(root), "--steps", "20"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(ended.stdout)
    assert isinstance(result, dict)
    return result


def main() -> int:
    """Runs the demo; 0 when everything it promises was seen."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    compilecache("plan", "--workload", "dflash_model.workload:tiny", "--lengths", str(LENGTHS),
                 "--device", "cpu", "--output", str(BUILD / "plan.yaml"))  # fmt: skip
    root = BUILD / "cache"
    cold = train("Cold: an empty cache. Every target is compiled and published.", root)
    print(f"\n$ rm -rf {root}    # somebody deletes the cache", flush=True)
    shutil.rmtree(root)
    warm = train("Warm: a fresh process restores, primes and trains with two threads.", root)
    compilecache("verify", str(BUILD / "plan.yaml"), "--root", str(root), "--device", "cpu")
    report = summarize(cold, warm)
    (BUILD / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_table(report, cold, warm)
    return 0 if report["passed"] else 1


def summarize(cold: dict[str, object], warm: dict[str, object]) -> dict[str, object]:
    """The figures of the report."""
    restored = warm["report"]
    assert isinstance(restored, dict)
    targets = restored["targets"]
    cold_seconds, warm_seconds = float(str(cold["warm_seconds"])), float(str(warm["warm_seconds"]))
    figures: dict[str, object] = {
        "cold_seconds": round(cold_seconds, 3),
        "warm_seconds": round(warm_seconds, 3),
        "warm_share_of_cold": round(warm_seconds / cold_seconds, 4),
        "targets": len(targets),
        "restored_targets": sum(row["status"] == "restored" for row in targets),
        "compiles_after_prime": warm["compiles_after_prime"],
        "losses_equal": cold["losses"] == warm["losses"],
        "losses": warm["losses"],
    }
    figures["passed"] = (
        figures["targets"] == figures["restored_targets"]
        and figures["compiles_after_prime"] == 0
        and figures["losses_equal"]
        and warm_seconds <= TARGET_SHARE * cold_seconds
    )
    return figures


def print_table(
    report: dict[str, object], cold: dict[str, object], warm: dict[str, object]
) -> None:
    """What happened, on 80 columns."""
    speed_up = float(str(cold["warm_seconds"])) / float(str(warm["warm_seconds"]))
    rows = [
        ("", "cold", "warm"),
        ("ensure_warm, seconds", f"{cold['warm_seconds']:.1f}", f"{warm['warm_seconds']:.1f}"),
        ("speed-up", "", f"{speed_up:.1f} x"),
        ("targets restored", "0", f"{report['restored_targets']} of {report['targets']}"),
        (
            "compiles in threads",
            str(cold["compiles_after_prime"]),
            str(warm["compiles_after_prime"]),
        ),
        ("losses of 2 x 20 steps", "", "equal" if report["losses_equal"] else "DIFFER"),
    ]
    print()
    for name, first, second in rows:
        print(f"{name:28}{first:>12}{second:>12}")
    print(f"\n{'passed' if report['passed'] else 'FAILED'}; see {BUILD / 'report.json'}")


if __name__ == "__main__":
    raise SystemExit(main())
