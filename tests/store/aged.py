"""A storage on which time has passed: what lay there looks older than it is."""

from __future__ import annotations

from pathlib import Path

from compilecache.storage import Blob, Sent, Storage, Stored

YEAR = 365 * 86400.0


class AgedStorage:
    """Another storage, with some of its objects made older in every listing."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.block_bytes = inner.url, inner.block_bytes
        self.workers, self.streams = inner.workers, inner.streams
        self.older: dict[tuple[str, float], float] = {}
        """Name and real time of an object → how many seconds it looks older."""

    def pass_time(self, seconds: float, folder: str = "v1") -> None:
        """Makes everything below a folder older."""
        for name, stored in self.inner.survey(folder).items():
            key = (f"{folder}/{name}", stored.modified)
            self.older[key] = self.older.get(key, 0.0) + seconds

    def survey(self, folder: str) -> dict[str, Stored]:
        """As the inner one, older."""
        return {
            name: Stored(s.size, s.modified - self.older.get((f"{folder}/{name}", s.modified), 0))
            for name, s in self.inner.survey(folder).items()
        }

    def half_uploads(self, folder: str) -> dict[str, Stored]:
        """As the inner one, a year older."""
        found = self.inner.half_uploads(folder)
        return {name: Stored(s.size, s.modified - YEAR) for name, s in found.items()}

    def read(self, name: str, limit: int) -> bytes:
        """As the inner one."""
        return self.inner.read(name, limit)

    def size(self, name: str) -> int | None:
        """As the inner one."""
        return self.inner.size(name)

    def open(self, name: str) -> Blob:
        """As the inner one."""
        return self.inner.open(name)

    def create(self, name: str, data: bytes) -> bool:
        """As the inner one."""
        return self.inner.create(name, data)

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        """As the inner one."""
        self.inner.upload(name, source, replace=replace, sent=sent)

    def walk(self, folder: str) -> dict[str, int]:
        """As the inner one."""
        return self.inner.walk(folder)

    def glance(self, folder: str, most: int) -> list[str] | None:
        """As the inner one."""
        return self.inner.glance(folder, most)

    def folders(self, folder: str) -> list[str]:
        """As the inner one."""
        return self.inner.folders(folder)

    def delete(self, name: str) -> None:
        """As the inner one."""
        self.inner.delete(name)

    def drop_half_upload(self, name: str) -> None:
        """As the inner one."""
        self.inner.drop_half_upload(name)
