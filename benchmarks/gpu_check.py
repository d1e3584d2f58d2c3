"""One command for a machine with GPUs: the ``gpu`` tests and the GPU benchmarks, a table last.

Usage: gpu_check.py [--only tests,tiny,qwen3-4b,programs,offline,incident] [--seq-lens 512,1024] [--rounds 2]
[--parts devices,prime,step,threads] [--folder DIR]. Programs take four lengths and about 17 minutes on two
GPUs; where a command may take less, name the parts, and a folder that keeps what was compiled cold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from results import RESULTS, Row, machine, slug, table

ROOT = Path(__file__).parent.parent


def run(title: str, *words: str) -> bool:
    """One step, its output as it comes; True when it went well."""
    print(f"\n== {title}", flush=True)
    began = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode
    print(
        f"== {title}: {'ok' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s"
    )
    return code == 0


def main() -> int:
    """0 when everything asked for went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="tests,tiny,qwen3-4b,programs,offline,incident")
    parser.add_argument("--seq-lens", default="512,1024")
    parser.add_argument("--rounds", default="2")
    parser.add_argument("--parts", default="cold,step,threads", help="of programs")
    parser.add_argument("--folder", help="kept for later parts of prime, programs and offline")
    arguments = parser.parse_args()
    kept = ("--folder", arguments.folder) if arguments.folder else ()
    count = torch.cuda.device_count()
    if count == 0:
        print("error: no CUDA GPU on this machine; run this where there is one", file=sys.stderr)
        return 2
    devices = ",".join(f"cuda:{index}" for index in range(min(count, 2)))
    steps = arguments.only.split(",")
    good: dict[str, bool] = {}
    if "tests" in steps:
        good["tests"] = run(
            "gpu tests", "-m", "pytest", "-q", "-m", "gpu", "--confcutdir=tests/gpu", "tests/gpu"
        )
    others = ("tests", "programs", "offline", "incident")
    for preset in (step for step in steps if step not in others):
        lengths = "256" if preset == "tiny" else arguments.seq_lens
        good[preset] = run(f"prime {preset}", "benchmarks/prime.py", "--preset", preset, "--devices",
                           devices, "--seq-lens", lengths, "--rounds", arguments.rounds,
                           *kept)  # fmt: skip
    if "programs" in steps:
        good["programs"] = run("programs", "benchmarks/programs.py", "--preset", "qwen3-4b",
                               "--devices", devices, "--rounds", arguments.rounds,
                               "--parts", arguments.parts, *kept)  # fmt: skip
    if "offline" in steps:
        good["offline"] = run("offline", "benchmarks/offline.py", "--devices", devices,
                              "--seq-lens", "256,384,512", "--repeats", "10", *kept)  # fmt: skip
    if "incident" in steps:
        good["incident"] = run("incident", "benchmarks/incident_replay.py", "--device", "cuda",
                               "--preset", "qwen3-4b", "--gpus", "2")  # fmt: skip
    print()
    for path in sorted(RESULTS.glob(f"*-{slug(machine())}.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        print(f"{result['bench']} ({result['date']})")
        print(table([Row(**row) for row in result["rows"]]))
    print(", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in good.items()))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
