"""Proof that a cache is warm: every target run in a fresh process that sees a copy of it.

The copy holds what a restore elsewhere would bring and nothing else, where records say what that
is; the cache itself is not touched. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from compilecache.cachedir import CacheDir
from compilecache.child import ask, environment_of
from compilecache.errors import PlanError, UnexpectedCompile, UnsafePath
from compilecache.evidence import Evidence
from compilecache.fingerprint import Fingerprint
from compilecache.kernels import regroup
from compilecache.rootfolder import OWN
from compilecache.shapes import CompileTarget, ShapePlan


class Request(BaseModel):
    """What the fresh process is to run."""

    plan: ShapePlan
    devices: list[str]
    root: str
    """Its cache root."""
    source: str | None = None
    """A root to fill that one from: with what a restore would bring, or else with everything."""


class Row(BaseModel):
    """What one target did there."""

    model_config = ConfigDict(frozen=True)

    target: CompileTarget
    evidence: Evidence | None = None
    """None when it failed."""
    files: tuple[str, ...] = ()
    """Cache files it needed."""
    error: str | None = None
    engine: str = "trace"
    """Which engine it went by."""
    notes: tuple[str, ...] = ()
    """Why not by another, in words."""

    @property
    def warm(self) -> bool:
        """It ran from the cache and generated no code."""
        return bool(self.evidence and self.evidence.compiled_nothing and self.evidence.hits)

    @property
    def seen(self) -> str:
        """What it did, in words; why it failed."""
        seen = self.evidence
        if seen is None:
            return str(self.error)
        return (
            f"{seen.hits} hits, {seen.misses} misses, {seen.bypasses} bypasses, "
            f"{seen.launches} compiler launches, {len(seen.foreign_files)} new files"
        )

    def __str__(self) -> str:
        by = f"{self.engine}, " if self.engine != "trace" else ""
        return f"{self.target}: {by}{self.seen}"


class Result(BaseModel):
    """Everything the fresh process saw, or why it could see nothing."""

    fingerprint: str = ""
    """Its fingerprint, as ``Fingerprint.dump`` writes it."""
    rows: tuple[Row, ...] = ()
    error: str | None = None

    @property
    def warm(self) -> bool:
        """Every target was."""
        return self.error is None and all(row.warm for row in self.rows)

    @property
    def digest(self) -> str:
        """The fingerprint's digest."""
        return Fingerprint.parse(self.fingerprint).digest


def prove(
    plan: ShapePlan,
    devices: Sequence[str],
    root: Path,
    *,
    timeout: float | None = None,
) -> Result:
    """Runs every target of the plan in a new process on a copy of ``root``.

    Raises UnexpectedCompile when the root is empty, CompileFailed when that process dies or outlives ``timeout`` seconds, PlanError for what
    it says of the plan, the workload or the devices.
    """
    if not CacheDir(root).files():
        raise UnexpectedCompile(
            f"cache root '{root}' is empty: every target would be compiled",
            next_step="Run 'compilecache restore' or 'compilecache warm' with this plan first",
            target="all",
        )
    with copy_of(root, ()) as copy:
        request = Request(plan=plan, devices=list(devices), root=str(copy), source=str(root))
        return run_fresh(request, timeout)


@contextmanager
def copy_of(source: Path, paths: Iterable[str]) -> Iterator[Path]:
    """A folder with hard links (copies, across file systems) of these files; gone afterwards."""
    near = source / OWN
    parent = near if os.access(near, os.W_OK) else None
    if parent is not None:
        _sweep(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"proof-{os.getpid()}-") as folder:
        link_files(source, Path(folder), paths)
        yield Path(folder)


def _sweep(parent: Path) -> None:
    """Removes what proofs left that were killed."""
    for left in parent.glob("proof-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def link_files(source: Path, copy: Path, paths: Iterable[str]) -> None:
    """Puts those of the files that exist into the copy. Raises UnsafePath for a link."""
    chosen = [path for path in paths if os.path.lexists(source / path)]
    for path in chosen:
        place = copy / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _link(source / path, place)
    regroup(copy, chosen)


def _link(source: Path, place: Path) -> None:
    if source.is_symlink():
        raise UnsafePath(
            f"'{source}' is a link",
            next_step="Remove it from the cache; only regular files are proven and packed",
            path=source,
        )
    try:
        os.link(source, place)
    except OSError:
        shutil.copyfile(source, place)


def run_fresh(request: Request, timeout: float | None = None) -> Result:
    """Runs every target in a new Python process with ``request.root`` itself as its cache."""
    result = ask(
        "compilecache.fresh",
        request,
        Result,
        environment_of(Path(request.root)),
        who="fresh process",
        next_step="and run the workload's step by hand",
        timeout=timeout,
    )
    if result.error is not None:
        raise PlanError(
            f"in a fresh process: {result.error}", next_step="Mend that, then try again"
        )
    return result
