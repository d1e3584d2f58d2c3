"""What ``fsck`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "record",
    "pack",
    "signature",
    "files",
    "fingerprint",
    "tag",
    "orphan",
    "half upload",
    "superseded",
    "foreign",
]
LITTER: tuple[Kind, ...] = ("orphan", "half upload", "superseded", "foreign")
"""Findings that harm nobody."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    """``record``: it cannot be read; ``pack``: missing, or other bytes; ``files``: missing, or other
    bytes, in a cache root; ``signature``: not one, or none of a trusted key; ``fingerprint``: fingerprint.json is missing or another one; ``tag``: it cannot be read, or what
    it names is not there. The others
    harm nobody: ``orphan``: nothing needs it; ``half upload``; ``superseded``: a damaged generation
    below a whole one; ``foreign``: a later version wrote it."""
    where: str
    """The object, relative to its fingerprint (a tag: to the store), or the file."""
    what: str
    """What is wrong, in words."""
    fingerprint: str = ""
    key: str = ""
    """The target that cannot be restored, or not from its newest generation."""

    @property
    def harmless(self) -> bool:
        """Whether nobody misses anything."""
        return self.kind in LITTER
