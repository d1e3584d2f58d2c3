"""What a store and a cache root have in common about what they keep, and how much that is."""

from __future__ import annotations

from dataclasses import dataclass

DAY = 86400.0
KEEP_DAYS = 90.0
GRACE_HOURS = 24.0
STORE_BYTES = 100 * 10**9
STORE_FINGERPRINTS = 100
ROOT_BYTES = 20 * 10**9
ROOT_FILES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What never goes, and how old anything may get."""

    keep_days: float = KEEP_DAYS
    """What was not published, or in a root not used, for longer goes."""
    grace_hours: float = GRACE_HOURS
    """What is younger, claimed or used within it is never touched."""
    keep: tuple[str, ...] = ()
    """Fingerprints, or how they begin, that never go as a whole."""

    @property
    def longest(self) -> float:
        """``keep_days`` in seconds."""
        return self.keep_days * DAY

    @property
    def grace(self) -> float:
        """``grace_hours`` in seconds."""
        return self.grace_hours * 3600

    def asked_for(self, fingerprint: str) -> bool:
        """Whether somebody wants this one to stay."""
        return bool(self.keep) and fingerprint.startswith(self.keep)
