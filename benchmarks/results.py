"""How every benchmark writes down what it measured: where, on what, against what."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    figure: str
    """Its name, the same in every run."""
    value: float
    """What was measured."""
    unit: str
    """Of the value: "MB/s", "s", "ratio of rates", …"""
    against: str | None = None
    """What it is compared with, measured in the same run."""
    ratio: float | None = None
    """The comparison; above 1 is more of the unit than the other has."""
    other: float | None = None
    """What the other one measured."""
    target: str | None = None
    """What the ratio should be: "<= 1.2"; where it is a least, ">= 4", the ratio says how many times
    less of the unit than the other the value is."""
    passed: bool | None = None
    """Whether it is."""
    commit: str | None = None
    """That it was measured at, where that is not its result's."""


def report(bench: str, rows: Sequence[Row], *, as_json: bool, folder: Path = RESULTS) -> Path:
    """Writes ``<folder>/<bench>-<machine>.json`` and prints it, as JSON or as a table."""
    path = write(bench, rows, folder=folder)
    print(path.read_text(encoding="utf-8") if as_json else table(rows), end="")
    return path


def write(bench: str, rows: Sequence[Row], *, folder: Path = RESULTS, **more: object) -> Path:
    """Writes ``<folder>/<bench>-<machine>.json``; ``more``: what else it should say."""
    result = {
        "bench": bench,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "machine": machine(),
        **more,
        "rows": [_plain(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(bench, folder)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def path_of(bench: str, folder: Path = RESULTS) -> Path:
    """Where the result of a benchmark on this machine goes."""
    return folder / f"{bench}-{slug(machine())}.json"


def _plain(row: Row) -> dict[str, object]:
    """Without what only some rows have."""
    judged = ("other", "target", "passed", "commit")
    return {k: v for k, v in asdict(row).items() if v is not None or k not in judged}


def table(rows: Sequence[Row]) -> str:
    """The figures in 80 columns."""
    if any(row.target for row in rows):
        return _judged(rows)
    lines = [f"{'figure':<36}{'value':>10} {'unit':<14}{'against':<12}{'ratio':>7}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        against = (row.against or "")[:11]
        lines.append(
            f"{row.figure[:35]:<36}{row.value:>10.4g} {row.unit[:13]:<14}{against:<12}{ratio:>7}"
        )
    return "\n".join(lines) + "\n"


def _judged(rows: Sequence[Row]) -> str:
    """The same for figures that have targets."""
    lines = [f"{'figure':<31}{'value':>9}{'other':>10} {'unit':<8}{'ratio':>7}{'target':>9}"]
    for row in rows:
        other = "" if row.other is None else f"{row.other:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        verdict = {True: "ok", False: "MISS", None: ""}[row.passed]
        lines.append(
            f"{row.figure[:30]:<31}{row.value:>9.4g}{other:>10} {row.unit[:8]:<8}{ratio:>7}"
            f"{row.target or '':>9} {verdict}".rstrip()
        )
    return "\n".join(lines) + "\n"


def machine() -> dict[str, str | int | float | list[str] | None]:
    """What matters of this machine; its name does not."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "gpus": _gpus(),
    }


def slug(facts: dict[str, str | int | float | list[str] | None]) -> str:
    """A short name of a machine for file names: its GPUs, or its processor and cores."""
    gpus = facts["gpus"]
    if isinstance(gpus, list) and gpus:
        text = f"{len(gpus)}x-{gpus[0]}"
    else:
        text = f"{facts['cpu']}-{facts['cores']}c"
    plain = re.sub(r"\((R|TM)\)|\bCPU\b|@.*?(?=-\d+c$)", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def commit() -> str | None:
    """The commit measured; "+" after it when the tree had changes other than results.

    Where the tree was copied without its history, BENCH_COMMIT says which it is.
    """
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return f"{head}+" if changes else head


def _git(*words: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip()]
