"""What a check found, and how bad it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
"""note: good to know. warning: a start may compile, or run slowly. error: a command or a run would fail."""

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")

Group = Literal["root", "lock", "store", "settings", "torch", "packages", "plan"]

GROUPS: tuple[Group, ...] = ("root", "lock", "store", "settings", "torch", "packages", "plan")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    """What is so, in half a sentence."""
    why: str = ""
    """Why it matters; empty when all is well."""
    fix: str = ""
    """A command that mends it, or shows where; where there is none, a sentence, which begins with a
    capital and has no full stop. Empty when nothing is needed."""
    level: Level = "ok"

    @property
    def is_command(self) -> bool:
        """Whether ``fix`` can be given to a shell."""
        return bool(self.fix) and not self.fix[0].isupper()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found."""

    root: str
    """The cache root."""
    store: str | None
    """The store's address; None without one."""
    findings: tuple[tuple[Group, Finding], ...]
    """In the order of the checks."""

    def of(self, level: Level) -> Iterator[tuple[Group, Finding]]:
        """What was found of that level."""
        return (pair for pair in self.findings if pair[1].level == level)

    @property
    def worst(self) -> Level:
        """The highest level found."""
        return worst(finding for _, finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "level": self.worst,
            "root": self.root,
            "store": self.store,
            "findings": [{"group": group, **asdict(finding)} for group, finding in self.findings],
        }


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level among findings; "ok" when there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
