"""The report of the last warm-up of a cache root, kept there."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from compilecache.errors import PlanError
from compilecache.files import replacing
from compilecache.report import Report
from compilecache.rootfolder import OWN

NAME = "report.json"


def keep_report(root: Path, report: Report) -> None:
    """Puts it where ``last_report`` finds it. Raises OSError."""
    with replacing(root / OWN / NAME) as file:
        file.write(report.model_dump_json(indent=2).encode() + b"\n")


def last_report(root: Path) -> Report:
    """Raises PlanError when there is none, or it cannot be read."""
    path = root / OWN / NAME
    if not path.is_file():
        raise PlanError(
            f"cache root '{root}' holds no report of a warm-up",
            next_step="Run 'compilecache warm' with --root, or name a file that 'warm --json' wrote",
        )
    return read_report(path)


def read_report(path: Path) -> Report:
    """What ``compilecache warm --json`` printed. Raises PlanError."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no report"
        raise PlanError(
            f"report '{path}' cannot be read: {why}",
            next_step="Name a file that 'compilecache warm --json' wrote",
        ) from error
