"""Every error this library raises: one base, few leaves, each also the built-in a caller would expect."""

from __future__ import annotations

from pathlib import Path


class CompileCacheError(Exception):
    """Base of all errors; ``str(error)`` says what is wrong and ends with the next step."""

    def __init__(self, problem: str, *, next_step: str) -> None:
        self.problem = problem
        self.next_step = next_step
        super().__init__(f"{problem}. {next_step}.")


class PlanError(CompileCacheError, ValueError):
    """A plan, spec, length, workload or device that cannot be used; ``field`` names the culprit."""

    def __init__(self, problem: str, *, next_step: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(problem, next_step=next_step)


class LockTimeout(CompileCacheError, TimeoutError):
    """Another process held the cache root longer than the time allowed; ``holder`` describes it."""

    def __init__(self, problem: str, *, next_step: str, holder: str) -> None:
        self.holder = holder
        super().__init__(problem, next_step=next_step)


class FingerprintMismatch(CompileCacheError, ValueError):
    """An artifact was made by another environment; ``changed`` maps component to (theirs, ours)."""

    def __init__(
        self, problem: str, *, next_step: str, changed: dict[str, tuple[str, str]] | None = None
    ) -> None:
        self.changed = changed or {}
        super().__init__(problem, next_step=next_step)


class ChecksumMismatch(CompileCacheError, ValueError):
    """Bytes differ from what the record promises; ``faults`` lists every one found, not only the first."""

    def __init__(self, problem: str, *, next_step: str, faults: tuple[str, ...] = ()) -> None:
        self.faults = faults
        super().__init__(problem, next_step=next_step)


class UntrustedArtifact(CompileCacheError, PermissionError):
    """A cache root or artifact that somebody else could have written."""


class UnsafePath(CompileCacheError, ValueError):
    """A name in a pack or record that would leave the cache root: absolute, ``..``, a link."""

    def __init__(self, problem: str, *, next_step: str, path: str | Path) -> None:
        self.path = str(path)
        super().__init__(problem, next_step=next_step)


class CompileFailed(CompileCacheError, RuntimeError):
    """A target could not be compiled or run; ``target`` names it."""

    def __init__(self, problem: str, *, next_step: str, target: str) -> None:
        self.target = target
        super().__init__(problem, next_step=next_step)


class UnexpectedCompile(CompileCacheError, RuntimeError):
    """Something compiled, or would have, where nothing was expected to; ``target`` names it.

    In a sealed process also: the ``thread``, the ``shapes`` of what was called, and the ``nearest``
    planned spec.
    """

    def __init__(
        self,
        problem: str,
        *,
        next_step: str,
        target: str,
        thread: str = "",
        shapes: tuple[str, ...] = (),
        nearest: str | None = None,
    ) -> None:
        self.target = target
        self.thread = thread
        self.shapes = shapes
        self.nearest = nearest
        super().__init__(problem, next_step=next_step)


class WorkerFailed(CompileCacheError, RuntimeError):
    """A thread of the run failed, so the others stop; ``worker`` names it, the cause is its error."""

    def __init__(self, problem: str, *, next_step: str, worker: str) -> None:
        self.worker = worker
        super().__init__(problem, next_step=next_step)


class RecompileBudgetExceeded(CompileCacheError, RuntimeError):
    """The plan needs more compiled entries for one code object than torch will keep."""

    def __init__(self, problem: str, *, next_step: str, needed: int, limit: int) -> None:
        self.needed = needed
        self.limit = limit
        super().__init__(problem, next_step=next_step)


class StoreUnavailable(CompileCacheError, OSError):
    """The artifact store did not answer, refused, or ran out of its time budget."""
