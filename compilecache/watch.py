"""Watches a process while something runs: which compilers start, which cache files are opened.

Uses one audit hook (PEP 578), installed on first use. It costs nothing while nobody watches.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COMPILERS = ("g++", "gcc", "cc", "c++", "clang", "clang++", "icpx", "nvcc", "ptxas", "hipcc", "ld")
"""Programs that produce code; Triton's own LLVM step always ends in one of them."""

ASKING = (
    *("--version", "-V", "-dumpversion", "-dumpfullversion", "-dumpmachine"),
    "-E",  # only preprocesses
    *("-Wl,-t", "-t"),  # ctypes.util.find_library asks where a library lies
)
"""Arguments of calls that only ask a compiler something."""

SHOWN_LETTERS = 300
"""Of a command line that is remembered."""

VERBOSE = "-v"
"""Asks for the version when it stands alone; Triton's every ptxas call has it too."""


@dataclass
class Sighting:
    """What was seen while watching; filled as it happens."""

    root: str
    """The cache root whose files are of interest."""
    launches: list[str] = field(default_factory=list)
    """Command lines of compilers that were started, without folders."""
    used: set[str] = field(default_factory=set)
    """Files below the root that were opened or loaded, relative to it."""


_watching: list[Sighting] = []
_lock = threading.Lock()
_hooked = False


@contextmanager
def watching(root: Path) -> Iterator[Sighting]:
    """Collects, from every thread of this process, until the block ends."""
    sighting = Sighting(root=os.path.abspath(root) + os.sep)  # noqa: PTH100 - plain strings in the hook
    with _lock:
        _install()
        _watching.append(sighting)
    try:
        yield sighting
    finally:
        with _lock:
            _watching[:] = [other for other in _watching if other is not sighting]


def _install() -> None:
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True


def _hook(event: str, args: tuple[object, ...]) -> None:
    if not _watching:
        return
    if event == "subprocess.Popen":
        command = _words(args[1])
        if is_compile(command):
            shown = " ".join(word.rpartition("/")[2] for word in command)[:SHOWN_LETTERS]
            for sighting in tuple(_watching):
                sighting.launches.append(shown)
    elif event in ("open", "ctypes.dlopen"):
        _used(args[0])
    elif event == "import" and len(args) > 1:
        _used(args[1])


def _used(name: object) -> None:
    if isinstance(name, str | bytes):
        path = os.fsdecode(name)
        for sighting in tuple(_watching):
            if path.startswith(sighting.root):
                sighting.used.add(path[len(sighting.root) :])


def _words(command: object) -> list[str]:
    if isinstance(command, str | bytes):
        return os.fsdecode(command).split()
    return (
        [os.fsdecode(word) for word in command if isinstance(word, str | bytes)]
        if isinstance(command, list | tuple)
        else []
    )


def is_compile(command: Sequence[str]) -> bool:
    """Whether a command line produces code: a known compiler, and not merely asked something."""
    arguments = [word for word in command[1:] if word != VERBOSE]
    if not arguments or any(word in ASKING for word in arguments):
        return False
    program = command[0].rsplit("/", 1)[-1]
    base = program.rstrip("0123456789.").rstrip("-")
    return any(base == name or base.endswith("-" + name) for name in COMPILERS)
