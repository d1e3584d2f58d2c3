"""Compile once, prove it, restore it: no thread of a training run ever compiles.

``ensure_warm(models, shapes)`` blocks until every planned shape is compiled and loaded in this
process. Whoever can write the artifact store can run code in the trainer: see docs/security.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compilecache.batches import PlannedCollate as PlannedCollate
    from compilecache.ensure import ensure_warm as ensure_warm
    from compilecache.errors import ChecksumMismatch as ChecksumMismatch
    from compilecache.errors import CompileCacheError as CompileCacheError
    from compilecache.errors import CompileFailed as CompileFailed
    from compilecache.errors import FingerprintMismatch as FingerprintMismatch
    from compilecache.errors import LockTimeout as LockTimeout
    from compilecache.errors import PlanError as PlanError
    from compilecache.errors import RecompileBudgetExceeded as RecompileBudgetExceeded
    from compilecache.errors import StoreUnavailable as StoreUnavailable
    from compilecache.errors import UnexpectedCompile as UnexpectedCompile
    from compilecache.errors import UnsafePath as UnsafePath
    from compilecache.errors import UntrustedArtifact as UntrustedArtifact
    from compilecache.errors import WorkerFailed as WorkerFailed
    from compilecache.guard.crew import Crew as Crew
    from compilecache.guard.warm import Warm as Warm
    from compilecache.shapes import CompileTarget as CompileTarget
    from compilecache.shapes import InputSpec as InputSpec
    from compilecache.shapes import ShapePlan as ShapePlan
    from compilecache.store import ArtifactStore as ArtifactStore
    from compilecache.workload import Workload as Workload

_HOMES = {
    "batches": ["PlannedCollate"],
    "ensure": ["ensure_warm"],
    "errors": [
        "ChecksumMismatch",
        "CompileCacheError",
        "CompileFailed",
        "FingerprintMismatch",
        "LockTimeout",
        "PlanError",
        "RecompileBudgetExceeded",
        "StoreUnavailable",
        "UnexpectedCompile",
        "UnsafePath",
        "UntrustedArtifact",
        "WorkerFailed",
    ],
    "guard.crew": ["Crew"],
    "guard.warm": ["Warm"],
    "shapes": ["CompileTarget", "InputSpec", "ShapePlan"],
    "store": ["ArtifactStore"],
    "workload": ["Workload"],
}
"""Where each public name lives; imported when first used, so that commands start at once."""

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"compilecache.{home}"), name)
    raise AttributeError(f"module 'compilecache' has no attribute {name!r}")
