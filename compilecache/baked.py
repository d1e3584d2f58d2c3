"""A cache that comes with an image: a store in a read-only folder, looked into before the real one.

It holds the artifacts of one plan for one fingerprint, names no place and belongs to whoever built the
image. What is restored from it goes into the cache root as from any store, every digest checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compilecache.cachedir import CacheDir
from compilecache.errors import CompileCacheError, PlanError
from compilecache.ownership import refuse_foreign
from compilecache.progress import Teller
from compilecache.shapes import ShapePlan
from compilecache.store import ArtifactStore

if TYPE_CHECKING:
    from compilecache.fingerprint import Fingerprint
    from compilecache.jobs import Publication

BAKED = "COMPILECACHE_BAKED"
READ_ONLY_FILE, READ_ONLY_FOLDER = 0o444, 0o555


def open_baked(
    folder: str | Path | None = None, trust_keys: Iterable[str | Path] | None = None
) -> ArtifactStore | None:
    """The cache baked at ``folder``, else where ``COMPILECACHE_BAKED`` says; None if neither names one.

    Raises PlanError when nothing is there, and UntrustedArtifact when somebody else could have put it
    there or could still change it.
    """
    named = folder or os.environ.get(BAKED) or None
    if named is None:
        return None
    path = Path(named)
    if not path.is_dir():
        raise PlanError(
            f"there is no baked cache in '{path}'",
            next_step=f"Lay one with 'warmup run PLAN --bake {path}', or unset {BAKED}",
            field="baked",
        )
    refuse_foreign(path)
    return ArtifactStore.open(path.absolute(), trust_keys=trust_keys)


def bake(
    plan: ShapePlan,
    devices: Sequence[str],
    cache: CacheDir,
    folder: Path,
    tell: Teller,
    *,
    sign_key: str | Path | None = None,
    mark: Fingerprint | None = None,
) -> Publication:
    """Lays what the root has of the plan into a folder that anybody may read and nobody write.

    Only ever adds: a folder baked before, for this fingerprint or another, gets what it lacks. ``mark``: the
    fingerprint, where it is known; else the model is built to find it. Raises CompileCacheError when the
    folder cannot be written.
    """
    from compilecache.jobs import (
        publish_plan,
    )  # imports torch, which looking into an image must not

    try:
        with _written(folder):
            store = ArtifactStore.open(folder.absolute(), sign_key=sign_key)
            return publish_plan(plan, devices, cache, store, tell, mark=mark)
    except OSError as error:
        if isinstance(error, CompileCacheError):
            raise
        raise CompileCacheError(
            f"baked cache '{folder}' cannot be written: {error.strerror or error}",
            next_step="Name a folder that this user may write with --bake",
        ) from error


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Lets this user write below a folder; afterwards everybody may read, and nobody write."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *_below(folder)):
        if path.is_dir():
            path.chmod(0o755)
    try:
        yield
    finally:
        for path in (*_below(folder), folder):
            path.chmod(READ_ONLY_FOLDER if path.is_dir() else READ_ONLY_FILE)


def _below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if not path.is_symlink()]
