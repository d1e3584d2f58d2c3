"""Cache roots of other compilers beside the one of Inductor: which there are, and where they lie.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compilecache.artifact import EXTRA, Record
from compilecache.cachedir import CacheDir
from compilecache.errors import PlanError
from compilecache.kernels import GROUP, regroup

VARIABLE = "COMPILECACHE_EXTRA_ROOTS"

UNFINISHED = re.compile(
    r"(^|/)(locks|tmp)/|(^|/)(tmp[._-]|\.tmp|\.nfs)|(^|/)tmp[a-z0-9_]{8}$|\.(lock|lck|tmp|part)$"
    r"|(^|/)\.[0-9]+\.[0-9]+\."
)
"""Locks and files still being written, in whatever cache: Triton's ``tmp.pid_*``, DeepGEMM's and
TileLang's folder ``tmp/``, FlashInfer's ``*.lock``."""
NOTHING = re.compile(r"(?!)")

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class Compiler:
    """Where a compiler keeps its cache."""

    variable: str
    """Environment variable that names the folder."""
    default: str
    """The folder without it."""
    below: str = ""
    """Where in that folder the cache lies."""
    remade: re.Pattern[str] = NOTHING
    """Files that hold the folder's own path, and are written anew in every root."""
    changing: re.Pattern[str] = NOTHING
    """Files that the compiler itself writes anew under the same name: never compared."""
    early: str = ""
    """Module that looks at the variable once, when it is imported."""


KNOWN = {
    "triton": Compiler(
        "TRITON_CACHE_DIR", "~/.triton/cache", remade=re.compile(rf"(^|/){GROUP}[^/]*$")
    ),
    "cuda": Compiler("CUDA_CACHE_PATH", "~/.nv/ComputeCache", changing=re.compile(r"^index$")),
    "flashinfer": Compiler(
        "FLASHINFER_WORKSPACE_BASE",
        "~",
        ".cache/flashinfer",
        changing=re.compile(r"(^|/)(\.ninja_(log|deps)|build\.ninja|[^/]+\.log)$"),
        early="flashinfer",
    ),
    "tilelang": Compiler("TILELANG_CACHE_DIR", "~/.tilelang/cache", early="tilelang"),
    "deepgemm": Compiler("DG_JIT_CACHE_DIR", "~/.deep_gemm"),
}
"""By the name that an option takes.

Sources: triton/knobs.py (``cache_knobs.dir``); the CUDA programming guide, "CUDA Environment
Variables" (Linux: ``~/.nv/ComputeCache``); flashinfer/jit/env.py (``FLASHINFER_BASE_DIR /
".cache" / "flashinfer"``); tilelang/env.py; DeepGEMM csrc/jit/compiler.hpp (``cache/`` and ``tmp/``
below the folder).
"""


class ExtraDir(CacheDir):
    """The root of another compiler: what that compiler rewrites is never compared."""

    def __init__(self, root: Path, changing: re.Pattern[str]) -> None:
        super().__init__(root)
        self._changing = changing

    def may_change(self, path: str) -> bool:
        """Whether a file that is here may have other content than recorded."""
        return bool(self._changing.search(path))


@dataclass(frozen=True, slots=True)
class ExtraRoot:
    """The cache of one more compiler."""

    name: str
    folder: Path
    """What its environment variable names."""

    @property
    def key(self) -> str:
        """Of its record."""
        return f"{EXTRA}{self.name}"

    @property
    def compiler(self) -> Compiler:
        """What is known of it; of any other name nothing."""
        return KNOWN.get(self.name, Compiler("", ""))

    @property
    def cache(self) -> ExtraDir:
        """Its root. Touches nothing."""
        return ExtraDir(self.folder / self.compiler.below, self.compiler.changing)

    def use(self) -> str | None:
        """Makes this process, and its children, read it where it is restored to.

        Returns why this process will not, when it is too late for that.
        """
        variable, default = self.compiler.variable, self.compiler.default
        if not variable:
            return None
        before = Path(os.environ.get(variable) or default).expanduser()
        os.environ[variable] = str(self.folder)
        if before == self.folder or not self._is_read():
            return None
        return (
            f"{variable}={self.folder} comes too late for this process, which keeps '{before}': set "
            "it before the process starts"
        )

    def _is_read(self) -> bool:
        """Whether this process has looked at the variable for good."""
        if self.name == "cuda":
            torch = sys.modules.get("torch")
            return torch is not None and torch.cuda.is_initialized()
        return self.compiler.early in sys.modules

    def files(self) -> tuple[list[str], list[str]]:
        """Finished files of the root, and links, which are left out."""
        cache = self.cache
        found = [
            path
            for path in sorted(cache.files())
            if not (UNFINISHED.search(path) or self.compiler.remade.search(path))
        ]
        links = [path for path in found if (cache.root / path).is_symlink()]
        files = [path for path in found if path not in set(links) and (cache.root / path).is_file()]
        return files, links

    def settle(self, record: Record) -> None:
        """Writes anew what holds the folder's own path. Raises OSError."""
        if self.name == "triton":
            regroup(self.cache.root, [entry.path for entry in record.files], folder="")


def parse_extra(text: str) -> ExtraRoot:
    """The extra root that "triton", or "triton=/path", means. Raises PlanError."""
    name, given, path = text.strip().partition("=")
    compiler = KNOWN.get(name)
    if not _NAME.fullmatch(name) or (compiler is None and not path):
        raise PlanError(
            f"'{text}' is no extra cache root",
            next_step=f"Name one of {', '.join(KNOWN)}, or any other as NAME=FOLDER",
            field="extra_roots",
        )
    if given and not path:
        raise PlanError(
            f"extra cache root '{name}' has no folder",
            next_step=f"Write {name}=FOLDER, or {name} alone for where it lies by default",
            field="extra_roots",
        )
    if not path and compiler is not None:
        path = os.environ.get(compiler.variable) or compiler.default
    return ExtraRoot(name, Path(os.path.abspath(Path(path).expanduser())))  # noqa: PTH100 - keeps links


def extra_roots(given: Iterable[str] | None, main: CacheDir | None = None) -> tuple[ExtraRoot, ...]:
    """The extra roots that these words mean; None: those that COMPILECACHE_EXTRA_ROOTS names.

    Raises PlanError for words that mean none, and for roots of which one lies in another.
    """
    if given is None:
        given = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    found = tuple(parse_extra(text) for text in dict.fromkeys(given))
    names = [extra.name for extra in found]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f"extra cache root '{name}' is named twice",
                next_step="Name each once",
                field="extra_roots",
            )
    _refuse_overlap(found, main)
    return found


def _refuse_overlap(found: Sequence[ExtraRoot], main: CacheDir | None) -> None:
    places = [(extra.name, extra.cache.root) for extra in found]
    if main is not None:
        places.append(("the cache root", main.root))
    for name, root in places:
        for other, place in places:
            if name != other and root.is_relative_to(place):
                raise PlanError(
                    f"extra cache root '{root}' ({name}) lies in '{place}' ({other}), whose files "
                    "would be taken twice",
                    next_step="Give each a folder of its own, or leave the inner one out",
                    field="extra_roots",
                )
