"""What the processes do that faults befall: the real commands' work, but for the compiler itself.

``jobs.warm_plan`` and ``jobs.restore_plan`` run as they are: root, lock, claims, store, publishing.
Instead of torch a few lines write the files that a compile would, each at once, as torch does it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from scene import Scene
from torch import nn

from compilecache import artifact, claims
from compilecache.cachedir import CacheDir
from compilecache.claims import Claims
from compilecache.engines.harness import Run
from compilecache.engines.trace import TraceEngine
from compilecache.errors import CompileCacheError, CompileFailed
from compilecache.evidence import Evidence
from compilecache.files import make_private, replacing
from compilecache.jobs import warm_plan
from compilecache.restoring import restore_plan
from compilecache.shapes import CompileTarget
from compilecache.store import ArtifactStore

WATCHED = ("open", "os.", "shutil.")
"""Events that count as operations if they are about a file of the trial."""


@dataclass(frozen=True)
class Task:
    """What one pod is to do, and what happens to it."""

    scene: Scene
    root: Path
    url: str
    said: Path
    """Where it notes what it has published, line by line."""
    restores: bool = False
    """Whether it only restores."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of s3fs."""
    budget: float = 30.0
    """Seconds that failures of the store may cost."""
    lease: float = 45.0
    beat: float = 10.0
    compile_seconds: float = 0.0
    shift: float = 0.0
    """Seconds by which its clock is wrong."""
    dies_at: int | None = None
    """The operation at which it is killed."""
    dies_after: float = 0.0
    """So many seconds after that operation has begun."""
    fills: tuple[int, Path, int] | None = None
    """The operation at which somebody fills this file system, and how many bytes are left on it."""
    uses_up_names: bool = False
    """Whether it is the inodes that are used up."""


@dataclass(frozen=True)
class Said:
    """What a pod that was not killed has to say."""

    compiled: tuple[str, ...] = ()
    """Keys of targets that it had to make."""
    missing: tuple[str, ...] = ()
    """Keys of targets, or their names, that it does not have."""
    troubles: tuple[str, ...] = ()
    """What it gave up, or passed over, in words."""
    refused: str = ""
    """Why it did not even begin: the root cannot be used."""
    error: str = ""
    """The error of ours that ended it."""
    crash: str = ""
    """Any other error that ended it."""
    operations: int = 0
    seconds: float = 0.0


def run(task: Task) -> Said:
    """The life of a pod, in a process of its own."""
    began, counted = time.monotonic(), _Operations(task)
    compiled: list[str] = []
    _compile_by_writing(task, compiled)
    _note_what_is_published(task.said)
    _set_clocks(task)
    sys.addaudithook(counted)
    try:
        said = _life(task)
    except CompileCacheError as error:
        said = Said(error=str(error))
    except Exception as error:  # whatever it is, it is no error of ours: that is what is looked for
        said = Said(crash=f"{type(error).__name__}: {error}")
    counted.over = True
    seconds = time.monotonic() - began
    return replace(said, compiled=tuple(compiled), operations=counted.count, seconds=seconds)


def _life(task: Task) -> Said:
    """Of a command: it may refuse the root, and else comes to an end."""
    cache = CacheDir(task.root)
    try:
        cache.prepare()
    except CompileCacheError as error:
        return Said(refused=str(error))
    store = ArtifactStore.open(
        task.url,
        budget_seconds=task.budget,
        storage_options=task.options,  # type: ignore[arg-type]
    )
    return _restore(task, cache, store) if task.restores else _warm(task, cache, store)


def _warm(task: Task, cache: CacheDir, store: ArtifactStore) -> Said:
    report = warm_plan(task.scene.plan, ["cpu"], cache, store, lock_timeout=60)
    done = {row.key for row in report.targets if row.status != "failed"}
    return Said(
        missing=tuple(sorted(task.scene.targets.keys() - done)), troubles=tuple(report.gave_up)
    )


def _restore(task: Task, cache: CacheDir, store: ArtifactStore) -> Said:
    told: list[str] = []
    done = restore_plan(task.scene.plan, ["cpu"], cache, store, told.append, lock_timeout=60)
    return Said(missing=done.missing, troubles=(*told, *done.faults))


# -- instead of torch ----------------------------------------------------------------------------


def _compile_by_writing(task: Task, compiled: list[str]) -> None:
    def run(
        self: TraceEngine,
        target: CompileTarget,
        module: nn.Module,
        present: Collection[str] | None = None,
    ) -> Run:
        files = task.scene.files(target.key)
        if present is None:
            compiled.append(target.key)
            time.sleep(task.compile_seconds)
            try:
                _write(task.root, files)
            except OSError as error:
                raise CompileFailed(
                    f"{target} failed: {error}", next_step="Look at it", target=str(target)
                ) from error
        return Run(_evidence(warm=present is not None), frozenset(files))

    TraceEngine.run = run  # type: ignore[method-assign]
    TraceEngine.compile_in_place = lambda *_: None  # type: ignore[method-assign]


def _evidence(*, warm: bool) -> Evidence:
    return Evidence(
        outcome="hit" if warm else "miss",
        hits=int(warm),
        misses=int(not warm),
        bypasses=0,
        launches=0,
        seconds=0,
        again_seconds=0,
    )


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        if not path.exists():
            make_private(path.parent)
            with replacing(path) as file:
                file.write(data)


# -- what is seen of it --------------------------------------------------------------------------


def _note_what_is_published(said: Path) -> None:
    publish = ArtifactStore.publish
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def noted(self: ArtifactStore, record: artifact.Record, pack: Path | None) -> artifact.Record:
        stored = publish(self, record, pack)
        os.write(out, f"{stored.key}\n".encode())
        return stored

    ArtifactStore.publish = noted  # type: ignore[method-assign]


def published(said: Path) -> set[str]:
    """What pods have noted there as published."""
    return set(said.read_text().splitlines()) if said.exists() else set()


def _set_clocks(task: Task) -> None:
    """Short leases, and a clock that goes wrong: what people read and what bodies of claims say."""
    init = Claims.__init__

    def shorter(self: Claims, *arguments: object, **more: object) -> None:
        init(self, *arguments, lease=task.lease, every=task.beat, **more)  # type: ignore[arg-type]

    Claims.__init__ = shorter  # type: ignore[method-assign]
    if task.shift:
        now = time.time

        def wrong() -> str:
            return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now() + task.shift))

        claims.utc_now = wrong
        time.time = lambda: now() + task.shift


# -- what befalls it -----------------------------------------------------------------------------


class _Operations:
    """Counts operations; at the chosen one the process dies, or its disk is full."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._folder = str(task.said.parent)
        self.count = 0
        self.over = False

    def _is_ours(self, event: str, arguments: tuple[object, ...]) -> bool:
        if not event.startswith(WATCHED):
            return event == "socket.connect"
        return any(str(one).startswith(self._folder) for one in arguments[:2])

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.over or not self._is_ours(event, arguments):
            return
        self.count += 1
        if self.count == self._task.dies_at:
            self._die()
        if self._task.fills and self.count == self._task.fills[0]:
            self.over = True
            _fill(self._task.fills[1], self._task.fills[2], names=self._task.uses_up_names)
            self.over = False

    def _die(self) -> None:
        if not self._task.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        timer = threading.Timer(self._task.dies_after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def _fill(disk: Path, left: int, *, names: bool) -> None:
    with suppress(OSError):
        if names:
            for number in range(1 << 16):
                (disk / f"filler-{number}").touch()
        with (disk / "filler").open("wb") as file:
            size = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            os.posix_fallocate(file.fileno(), 0, max(1, size - left))


def drain(disk: Path) -> None:
    """Gives back what was filled."""
    for path in disk.glob("filler*"):
        path.unlink()
