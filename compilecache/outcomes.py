"""What the run of a target comes to: its status, what should not have happened, what is told of it."""

from __future__ import annotations

from compilecache.artifact import Record
from compilecache.engines.harness import Run
from compilecache.engines.program import BY_TRACE
from compilecache.engines.programfile import program_among
from compilecache.report import Status
from compilecache.shapes import CompileTarget


def status(run: Run, *, complete: bool, restored: bool) -> Status:
    """``complete``: in the root before the run; ``restored``: because the store had it."""
    if not run.evidence.compiled_nothing or run.troubles:
        return "compiled"
    if run.origin is not None and not complete:
        return "rewritten"
    return "restored" if restored else "local"


def problem(target: CompileTarget, run: Run, *, complete: bool) -> str:
    """What ``strict`` takes for an error; "" when all is as it should be."""
    seen = run.evidence
    if seen.outcome == "bypass":
        return f"{target} is not wholly cached by torch: part of it compiles on every start"
    if seen.outcome == "live" and not run.entries:
        return f"torch compiled nothing of {target} and runs it as it is"
    if complete and not seen.compiled_nothing:
        return f"{target} was complete in the cache and compiled all the same ({_why(run)})"
    return ""


def notes(run: Run, record: Record | None) -> tuple[str, ...]:
    """What a run has to say; with the reason that whoever published by trace had."""
    why = (record.environment or {}).get("why") if record is not None else None
    return tuple(why if note == BY_TRACE and why else note for note in run.notes)


def facts(run: Run) -> dict[str, str]:
    """How a target came about, for whoever reads its record."""
    known = {"engine": run.engine, "why": "; ".join(run.notes), "compiled on": run.origin or ""}
    return {name: fact for name, fact in known.items() if fact and fact != "trace"}


def is_program(record: Record | None) -> bool:
    """Whether a record holds one."""
    return record is not None and program_among([e.path for e in record.files]) is not None


def _why(run: Run) -> str:
    seen = run.evidence
    launched = f": {'; '.join(seen.launched)}" if seen.launched else ""
    return (
        f"{seen.misses} misses, {seen.bypasses} bypasses, {len(seen.foreign_files)} new files, "
        f"{seen.launches} compiler launches{launched}"
    )
