"""What a warm start costs: cold, torch's own warm directory or artifacts, ours after a restore.

Every row is a fresh process with the same model, shapes and steps; the clock runs from the built
model to every target having run twice. Restored and torch-warm processes alternate, and the figure
is the median of their ratios. Ours goes by trace, and then by programs. Usage: prime.py [--preset tiny] [--seq-lens 256,512]
[--devices cpu] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from results import Row, report

from compilecache.cachedir import CacheDir

HERE = Path(__file__).parent


class Bench:
    """One cold run and the warm ones that build on it."""

    def __init__(
        self, folder: Path, preset: str, seq_lens: str, devices: str, engine: str = "trace"
    ) -> None:
        self.folder = folder
        self.devices = devices
        self.engine = engine
        self.artifacts = folder / "artifacts"
        self.plan = folder / "plan.yaml"
        words = ["plan", "--workload", "dflash_model.workload:dflash", "--set", f"preset={preset}"]
        words += ["--seq-lens", seq_lens, "--output", str(self.plan), "--json"]
        subprocess.run(
            [sys.executable, "-m", "compilecache", *words], check=True, stdout=subprocess.DEVNULL
        )
        self.cold = self.run("ours", "cold")

    def run(self, how: str, root: str) -> dict:  # type: ignore[type-arg]
        """One fresh process on a cache root of this name."""
        place = self.folder / root
        place.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, str(HERE / "worker.py"), how, "--plan", str(self.plan)]
        command += ["--devices", self.devices, "--root", str(place)]
        command += ["--store", str(self.folder / "store"), "--engine", self.engine]
        if how == "mega" or (how == "torch" and not self.artifacts.exists()):
            command += ["--artifacts", str(self.artifacts)]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(place),
            "TRITON_CACHE_DIR": str(place / "triton"),
        }
        ended = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        result: dict = json.loads(ended.stdout.splitlines()[-1])  # type: ignore[type-arg]
        print(f"{how:6} {root:10} {result['seconds']:8.2f} s", file=sys.stderr, flush=True)
        return result

    def restored(self, number: int, how: str = "ours") -> dict:  # type: ignore[type-arg]
        """On an empty root: ours from its store, or torch with the artifacts that it saved."""
        result = self.run(how, f"restored{number}")
        shutil.rmtree(self.folder / f"restored{number}")
        return result


def weight(root: Path) -> tuple[int, int]:
    """Files and bytes of a cache directory."""
    files = CacheDir(root).files()
    return len(files), sum((root / path).stat().st_size for path in files)


def prime_seconds(result: dict) -> float:  # type: ignore[type-arg]
    """Without the transfer from the store."""
    return float(result["seconds"]) - float(result["report"]["restore_seconds"])


def differences(one: dict, other: dict) -> tuple[float, float]:  # type: ignore[type-arg]
    """Largest relative difference of loss and of gradient norm between two processes."""
    worst = [0.0, 0.0]
    for name, values in one["steps"].items():
        for i in (0, 1):
            here, there = values[i], other["steps"][name][i]
            worst[i] = max(worst[i], abs(here - there) / max(abs(here), 1e-30))
    return worst[0], worst[1]


def rows_of(bench: Bench, torch_warm: list[dict], restored: list[dict]) -> list[Row]:  # type: ignore[type-arg]
    """The figures."""
    targets = bench.cold["report"]["targets"]
    evidence = [row["evidence"] for result in restored for row in result["report"]["targets"]]
    files, size = weight(bench.folder / "cold")
    packed = restored[0]["report"]
    pack_bytes = sum(p.stat().st_size for p in bench.folder.rglob("packs/*.tar.zst"))
    cold = float(bench.cold["seconds"])
    warm = median(r["seconds"] for r in torch_warm)
    ours = median(map(prime_seconds, restored))
    whole = median(r["seconds"] for r in restored)
    ratio = median(
        prime_seconds(a) / b["seconds"] for a, b in zip(restored, torch_warm, strict=True)
    )
    loss, norm = differences(bench.cold, restored[0])
    gpu = "gpu_" if bench.devices.startswith("cuda") else ""
    return [
        Row("targets", len(targets), "targets"),
        Row("cold", cold, "s"),
        Row("prime_torch_warm", warm, "s", "cold", warm / cold),
        Row("prime_restored_vs_torch_warm", ours, "s", "torch warm", ratio),
        Row("restore_and_prime_vs_cold", whole, "s", "cold", whole / cold),
        Row(f"{gpu}misses_after_restore", sum(e["misses"] for e in evidence), "misses"),
        Row(
            f"{gpu}compiler_launches_after_restore",
            sum(e["launches"] for e in evidence),
            "launches",
        ),
        Row("foreign_files_after_restore", sum(len(e["foreign_files"]) for e in evidence), "files"),
        Row("loss_rel_diff_restored", loss, "relative", "cold", loss),
        Row("grad_norm_rel_diff_restored", norm, "relative", "cold", norm),
        Row("pack_bytes_vs_directory", pack_bytes, "bytes", "directory", pack_bytes / size),
        Row(
            "restored_bytes_vs_directory",
            packed["restored_bytes"],
            "bytes",
            "directory",
            packed["restored_bytes"] / size,
        ),
        Row(
            "restored_files_vs_directory",
            packed["restored_files"],
            "files",
            "directory",
            packed["restored_files"] / files,
        ),
    ]


def program_rows(programs: Bench, rounds: int, cold: float) -> list[Row]:
    """The figures of engine program; what was rewritten for another GPU also by itself."""
    restored = [programs.restored(number) for number in range(rounds)]
    first = float(programs.cold["seconds"])
    whole = median(result["seconds"] for result in restored)
    rows = [
        Row("program_cold", first, "s", "cold", first / cold),
        Row("program", whole, "s", "cold", whole / cold),
    ]
    pairs = [by_origin(result) for result in restored]
    if all(moved for _, moved in pairs):
        ratio = median(moved / own for own, moved in pairs)
        rewritten = median(moved for _, moved in pairs)
        rows.append(Row("program_rewritten", rewritten, "s", "own GPU", ratio))
    return rows


def by_origin(result: dict) -> tuple[float, float]:  # type: ignore[type-arg]
    """Seconds of a process's targets: compiled for the GPU that they run on, and rewritten for it."""
    seconds = [0.0, 0.0]
    for row in result["report"]["targets"]:
        seen = row["evidence"]
        seconds[row["origin"] is not None] += seen["seconds"] + seen["again_seconds"]
    return seconds[0], seconds[1]


def main() -> None:
    """Runs it and writes benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seq-lens", default="256,512")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    given = (arguments.preset, arguments.seq_lens, arguments.devices)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        bench = Bench(Path(folder), *given)
        torch_warm, restored = [], []
        for number in range(arguments.rounds):
            torch_warm.append(bench.run("torch", "cold"))
            restored.append(bench.restored(number))
        rows = rows_of(bench, torch_warm, restored)
        cold = float(bench.cold["seconds"])
        mega = median(
            bench.restored(number, "mega")["seconds"] for number in range(arguments.rounds)
        )
        rows.append(Row("prime_mega_cache", mega, "s", "cold", mega / cold))
        rows += program_rows(Bench(Path(other), *given, "program"), arguments.rounds, cold)
        name = "prime" if arguments.preset == "tiny" else f"prime-{arguments.preset}"
        report(name, rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
