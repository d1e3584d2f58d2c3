"""What proves that nothing was compiled: counters, compiler launches and foreign files together.

Counters alone prove little: with every ``.so`` deleted torch still counts 100% hits while g++ runs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["hit", "miss", "bypass", "live"]


class Evidence(BaseModel):
    """What happened while one target ran."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Outcome
    """hit: every graph came from the cache. miss: something was compiled. bypass: a graph that torch
    never caches, so it compiles on every start. live: already in this process, nothing looked up."""
    hits: int = Field(ge=0)
    """Graphs found in the cache (AOTAutograd and FX graph)."""
    misses: int = Field(ge=0)
    """Graphs looked up and not found."""
    bypasses: int = Field(ge=0)
    """Graphs that torch declined to look up."""
    launches: int = Field(ge=0)
    """Compiler processes started (g++, ptxas, nvcc, …) that produced code."""
    launched: tuple[str, ...] = ()
    """The first of their command lines, without folders."""
    foreign_files: tuple[str, ...] = ()
    """Files that appeared below the cache root and are neither from the bundle nor re-emitted from it."""
    seconds: float = Field(ge=0)
    """First run of the target, wall clock."""
    again_seconds: float = Field(ge=0)
    """Second run, wall clock: what a step costs once everything is loaded."""
    peak_bytes: int | None = None
    """Peak device memory of the runs; None where the device does not count it."""

    @property
    def compiled_nothing(self) -> bool:
        """True only when counters, launches and files all agree that no code was generated."""
        return not (self.misses or self.bypasses or self.launches or self.foreign_files)
