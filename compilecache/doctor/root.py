"""Whether a folder can hold a cache: who may write it, where it lies, how much room there is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.doctor.finding import Finding
from compilecache.errors import CompileCacheError
from compilecache.rootfolder import LEAST_FREE, NETWORK, filesystem

IN_MEMORY = ("tmpfs", "ramfs")
LITTLE_FREE = 1 << 30
"""Bytes; a cache that grows with every shape is soon as large (353 MB in a few days were seen)."""
FEW_INODES = 10_000
"""A plan of some dozens of targets writes thousands of files."""
ELSEWHERE = "export COMPILECACHE_ROOT=$HOME/.cache/compilecache/root"


def check_root(cache: CacheDir) -> Iterator[Finding]:
    """Everything about the root; it is made where there is none, as 'compilecache warm' does it."""
    made = _refused(cache.create, "Nothing can be compiled, restored or locked there.")
    if made is not None:
        yield made
        return
    yield _owner(cache)
    yield from _place(cache)
    yield _execution(cache)
    yield _space(cache)
    yield from _inodes(cache)


def _refused(act: Callable[[], None], why: str, fix: str = ELSEWHERE) -> Finding | None:
    try:
        act()
    except CompileCacheError as error:
        return Finding(error.problem, why, fix, "error")
    return None


def _owner(cache: CacheDir) -> Finding:
    fix = f"chmod 700 {shlex.quote(str(cache.root))}"
    if cache.root.stat().st_uid not in (os.getuid(), 0):
        fix = ELSEWHERE
    why = "torch runs what lies there: whoever can write it runs code in the trainer."
    fine = Finding(f"the cache root '{cache.root}' is yours alone to write")
    return _refused(cache.refuse_foreign_owner, why, fix) or fine


def _place(cache: CacheDir) -> Iterator[Finding]:
    kind = filesystem(cache.root)
    if kind in NETWORK:
        yield Finding(
            f"the cache root '{cache.root}' lies on a network file system ({kind})",
            "Compilers and locks break there. Keep the root on a local disk, the store on the network.",
            ELSEWHERE,
            "error",
        )
    elif kind in IN_MEMORY:
        yield Finding(
            f"the cache root '{cache.root}' lies in memory ({kind})",
            "It counts against the memory of the pod and is gone after a restart. "
            "Fine if every start restores.",
            ELSEWHERE,
            "note",
        )
    elif _is_temporary(cache.root):
        yield Finding(
            f"the cache root '{cache.root}' lies in a folder for temporary files",
            "Whatever clears it clears the cache. Fine if every start restores.",
            ELSEWHERE,
            "note",
        )
    else:
        yield Finding(f"the cache root lies on a local disk ({kind})")


def _is_temporary(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp"))


def _execution(cache: CacheDir) -> Finding:
    why = "Every compiled kernel fails to load, and torch compiles it again or stops."
    fine = Finding("compiled kernels can be loaded from the cache root")
    return _refused(cache.refuse_noexec, why) or fine


def _space(cache: CacheDir) -> Finding:
    why = "A compile that finds no room fails half-way."
    full = _refused(cache.refuse_full, why, f"df -h {shlex.quote(str(cache.root))}")
    if full is not None:
        return full
    status = os.statvfs(cache.root)
    free = status.f_bavail * status.f_frsize
    if free < LITTLE_FREE:
        return Finding(
            f"the cache root has {free >> 20} MiB free, {LEAST_FREE >> 20} are the least",
            why,
            f"df -h {shlex.quote(str(cache.root))}",
            "warning",
        )
    return Finding(f"the cache root has {free >> 30} GiB free")


def _inodes(cache: CacheDir) -> Iterator[Finding]:
    status = os.statvfs(cache.root)
    if not status.f_files:
        return  # file systems that do not count them
    if status.f_favail < FEW_INODES:
        yield Finding(
            f"the cache root has room for {status.f_favail} more files",
            "Every target is dozens to hundreds of small files; the disk is then full with space left.",
            f"df -i {shlex.quote(str(cache.root))}",
            "warning" if status.f_favail >= FEW_INODES // 10 else "error",
        )
    else:
        yield Finding(f"the cache root has room for {status.f_favail} more files")
