"""One attempt to compile or trace in a process that is primed, as the hooks saw it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Literal

Kind = Literal["compile", "backward", "trace", "dense", "reset"]
"""compile: Dynamo would compile a frame. backward: AOTAutograd would compile a backward that it put
off. trace: FX would trace. dense: flex_attention would run uncompiled. reset: torch would forget
everything compiled."""

WHAT: dict[Kind, str] = {
    "compile": "would compile",
    "backward": "would compile the backward of",
    "trace": "would trace with torch.fx",
    "dense": "would run, uncompiled and on the dense path,",
    "reset": "would drop everything compiled, by",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who wanted to compile what."""

    kind: Kind
    function: str
    """Its name and where it stands."""
    shapes: tuple[str, ...] = ()
    """Its tensors in words: "x [2, 640] float32 cpu"."""
    why: Callable[[], list[str]] = field(default=lambda: [])
    """torch's reasons why no compiled entry fits; asked for only when somebody is told."""
    code: CodeType | None = None
    """Of the frame that Dynamo met."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)

    @property
    def words(self) -> str:
        """One line."""
        return f"thread {self.thread} {WHAT[self.kind]} {self.function}"
