"""What a warm start costs: cold, torch's own warm directory or artifacts, ours after a restore.

Every row is a fresh process with the same model, shapes and steps; the clock runs from the built
model to every target having run twice.
trace    cold; then restored and torch-warm processes alternate, the figure is the median of their ratios
mega     torch loads the artifacts that it saved after trace's cold run
program  cold and restored by programs, against trace's cold run
The result is written as soon as a part is measured, and parts of one setting go together, whatever
the commit (a row of another one names it); with --folder what was compiled cold serves a later call,
too, and a part compiles what it needs and does not find there.
Usage: prime.py [--preset tiny] [--seq-lens 256,512] [--devices cpu] [--parts trace,mega,program]
[--rounds 3] [--folder /tmp/prime] [--json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from programs import Answer, Bench, Setting, Sheet, name_of, note, run_parts, weight
from results import Row


class Prime(Bench):
    """Fresh processes on all devices over one folder; what was compiled cold is compiled once."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(setting, folder)
        self.count = len(setting.devices)
        self.artifacts = folder / "artifacts"

    def seconds_cold(self, engine: str) -> float:
        """Of the cold run."""
        return float(self.cold(engine, self.count)["seconds"])

    def torch_warm(self) -> Answer:
        """Torch alone on the directory that trace left; saves its artifacts unless there are some."""
        self.cold("trace", self.count)
        words = () if self.artifacts.exists() else ("--artifacts", self.artifacts)
        return self._by_torch("torch", self.root("trace", self.count), *words)

    def mega(self) -> Answer:
        """Torch alone on an empty root, with the artifacts that it saved."""
        with self.empty_root() as root:
            return self._by_torch("mega", root, "--artifacts", self.artifacts)

    def _by_torch(self, how: str, root: Path, *words: object) -> Answer:
        options = ("--plan", self.own_plan(), *words)
        result = self.run("worker.py", how, root, self.setting.devices, *options)
        note(f"{how}: {result['seconds']:.1f} s")
        return result


# -- parts ------------------------------------------------------------------------------------


def trace(bench: Prime, sheet: Sheet) -> None:
    """Cold, then torch warm and ours restored in turn."""
    torch_warm, restored = [], []
    for _ in range(bench.setting.rounds):
        torch_warm.append(bench.torch_warm())
        restored.append(bench.restored(bench.count, engine="trace"))
    for row in rows_of(bench, torch_warm, restored):
        sheet.add(row)


def mega(bench: Prime, sheet: Sheet) -> None:
    """Torch with its artifacts; they are saved here where the part trace has not run."""
    cold = bench.seconds_cold("trace")
    if not bench.artifacts.exists():
        bench.torch_warm()
    seconds = median(bench.mega()["seconds"] for _ in range(bench.setting.rounds))
    sheet.add(Row("prime_mega_cache", seconds, "s", "cold", seconds / cold))


def program(bench: Prime, sheet: Sheet) -> None:
    """By engine program; what was rewritten for another GPU also by itself."""
    cold, first = bench.seconds_cold("trace"), bench.seconds_cold("program")
    sheet.add(Row("program_cold", first, "s", "cold", first / cold))
    restored = [bench.restored(bench.count) for _ in range(bench.setting.rounds)]
    whole = median(result["seconds"] for result in restored)
    sheet.add(Row("program", whole, "s", "cold", whole / cold))
    pairs = [by_origin(result) for result in restored]
    if all(moved for _, moved in pairs):
        ratio = median(moved / own for own, moved in pairs)
        rewritten = median(moved for _, moved in pairs)
        sheet.add(Row("program_rewritten", rewritten, "s", "own GPU", ratio))
    else:
        sheet.leave_out("program_rewritten", f"nothing was rewritten on {bench.setting.devices}")


# -- figures ----------------------------------------------------------------------------------


def prime_seconds(result: Answer) -> float:
    """Without the transfer from the store."""
    return float(result["seconds"]) - float(result["report"]["restore_seconds"])


def differences(one: Answer, other: Answer) -> tuple[float, float]:
    """Largest relative difference of loss and of gradient norm between two processes."""
    worst = [0.0, 0.0]
    for name, values in one["steps"].items():
        for i in (0, 1):
            here, there = values[i], other["steps"][name][i]
            worst[i] = max(worst[i], abs(here - there) / max(abs(here), 1e-30))
    return worst[0], worst[1]


def rows_of(bench: Prime, torch_warm: list[Answer], restored: list[Answer]) -> list[Row]:
    """The figures of engine trace."""
    first = bench.cold("trace", bench.count)
    targets = first["report"]["targets"]
    evidence = [row["evidence"] for result in restored for row in result["report"]["targets"]]
    files, size = weight(bench.root("trace", bench.count))
    packed = restored[0]["report"]
    packs = bench.store("trace", bench.count).rglob("packs/*.tar.zst")
    pack_bytes = sum(path.stat().st_size for path in packs)
    cold = float(first["seconds"])
    warm = median(r["seconds"] for r in torch_warm)
    ours = median(map(prime_seconds, restored))
    whole = median(r["seconds"] for r in restored)
    ratio = median(
        prime_seconds(a) / b["seconds"] for a, b in zip(restored, torch_warm, strict=True)
    )
    loss, norm = differences(first, restored[0])
    gpu = "gpu_" if bench.setting.devices[0].startswith("cuda") else ""
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


def by_origin(result: Answer) -> tuple[float, float]:
    """Seconds of a process's targets: compiled for the GPU that they run on, and rewritten for it."""
    seconds = [0.0, 0.0]
    for row in result["report"]["targets"]:
        seen = row["evidence"]
        seconds[row["origin"] is not None] += seen["seconds"] + seen["again_seconds"]
    return seconds[0], seconds[1]


# -- all --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Prime, Sheet], None]] = {
    "trace": trace,
    "mega": mega,
    "program": program,
}


def setting_of(options: argparse.Namespace) -> Setting:
    """What is not asked for here is the preset's own, or of other benchmarks."""
    return Setting(
        preset=options.preset,
        anchors=None,
        devices=options.devices.split(","),
        lengths=[int(word) for word in options.seq_lens.split(",")],
        rounds=options.rounds,
        repeats=0,
        calls=0,
        cold_trace=False,
    )


def main() -> int:
    """0 when every part could be measured, whatever the figures say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seq-lens", default="256,512")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="of warm starts and pairs")
    parser.add_argument("--folder", type=Path, help="keep there what was compiled cold")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setting = setting_of(options)
    sheet = Sheet(setting, "prime")
    wanted = options.parts.split(",")
    if unknown := sorted({*wanted} - PARTS.keys()):
        parser.error(f"there is no part {', '.join(unknown)}, only {', '.join(PARTS)}")
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Not programs.py's: here torch alone writes into the directory that trace left.
        bench = Prime(setting, folder / f"prime-{name_of(setting)}")
        return run_parts(PARTS, wanted, bench, sheet, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
