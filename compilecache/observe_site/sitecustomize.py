"""Runs at the start of every Python process below ``compilecache plan --observe``.

It waits for torch to be imported, imports nothing itself that the program did not ask for, and hands
over to the ``sitecustomize`` that would have run without it. The modules it needs are loaded by
their path: the observed interpreter need not have compilecache installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
DIRECTORY_VARIABLE = "COMPILECACHE_OBSERVE_DIR"


class _TorchFinder:
    """Finds torch as it would be found anyway, and runs the recorder's hook after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _run_after(spec, _observe)
        return spec


def _run_after(spec: ModuleSpec, hook: object) -> None:
    """Shadows the loader's ``exec_module`` once, on the instance; afterwards it is as before."""
    loader = spec.loader
    original = loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[union-attr]
        original(module)
        # Whatever goes wrong here must not reach the program.
        with suppress(Exception):
            hook(module)  # type: ignore[operator]

    loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]


def _observe(torch: ModuleType) -> None:
    arguments = _load("arguments", _HERE.parent / "arguments.py")
    recorder = _load("recorder", _HERE / "recorder.py")
    recorder.install(torch, Path(os.environ[DIRECTORY_VARIABLE]), arguments.leaves)


def _load(name: str, path: Path) -> ModuleType:
    full = f"_compilecache_observe_{name}"
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _hand_over() -> None:
    """Leaves sys.path as the program would have it and runs the next sitecustomize, if any."""
    sys.path[:] = [entry for entry in sys.path if not _is_here(entry)]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _is_here(entry: str) -> bool:
    return bool(entry) and Path(entry).resolve() == _HERE


if DIRECTORY_VARIABLE in os.environ and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _TorchFinder())
    _hand_over()
