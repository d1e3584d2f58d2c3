"""Saving a cache that somebody already has, as it is, before it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compilecache.artifact import ADOPTED
from compilecache.cachedir import CacheDir
from compilecache.contents import TRANSIENT
from compilecache.errors import PlanError
from compilecache.exchange import Exchange
from compilecache.fingerprint import Fingerprint, environment
from compilecache.kernels import is_group
from compilecache.proof import Request, Result, copy_of, run_fresh
from compilecache.shapes import ShapePlan
from compilecache.store import ArtifactStore


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was published of a directory."""

    fingerprint: str
    """Digest it was published under."""
    keys: tuple[str, ...]
    """Targets, or "adopted" for the directory as a whole."""
    files: int
    bytes: int
    result: Result | None = None
    """What the fresh process saw, when there was a plan."""


def adopt(folder: Path, store: ArtifactStore, device: str) -> Adopted:
    """Publishes a cache directory whole, under the environment of this machine.

    It is restored whole by whoever misses something in the same environment; torch's own keys then
    decide what fits. The directory is only read. Raises PlanError when it holds no cache.
    """
    files = cache_files(folder)
    with copy_of(folder, files) as copy:
        exchange = _exchange(copy, store, environment(torch.device(device)), [ADOPTED])
        exchange.publish(None, files, None)
        return _adopted(exchange)


def adopt_plan(
    folder: Path, store: ArtifactStore, plan: ShapePlan, devices: Sequence[str]
) -> Adopted:
    """Publishes what a plan's targets use of a cache directory, after proof in a fresh process.

    Targets that had to compile are not published; ``Adopted.result`` says which. The directory is
    only read. Raises PlanError when it holds no cache.
    """
    files = cache_files(folder)
    with copy_of(folder, files) as copy:
        result = run_fresh(Request(plan=plan, devices=list(devices), root=str(copy)))
        warm = [row for row in result.rows if row.warm]
        mark = Fingerprint.parse(result.fingerprint)
        exchange = _exchange(copy, store, mark, [row.target.key for row in warm])
        for row in warm:
            exchange.publish(row.target, row.files, row.evidence)
        return _adopted(exchange, result)


def cache_files(folder: Path) -> list[str]:
    """The files of a cache directory that are worth keeping: all but locks and unfinished ones."""
    present = sorted(CacheDir(folder).files())
    files = [path for path in present if not (TRANSIENT.search(path) or is_group(path))]
    if not files:
        raise PlanError(
            f"'{folder}' holds no compile cache",
            next_step="Name the folder that TORCHINDUCTOR_CACHE_DIR pointed at with --from",
            field="from",
        )
    return files


def _exchange(copy: Path, store: ArtifactStore, mark: Fingerprint, keys: Sequence[str]) -> Exchange:
    cache = CacheDir(copy)
    cache.prepare()
    return Exchange(cache, store, mark, keys)


def _adopted(exchange: Exchange, result: Result | None = None) -> Adopted:
    entries = {e.path: e for record in exchange.complete.values() for e in record.files}
    return Adopted(
        fingerprint=exchange.mark.digest,
        keys=tuple(exchange.complete),
        files=len(entries),
        bytes=sum(entry.size for entry in entries.values()),
        result=result,
    )
