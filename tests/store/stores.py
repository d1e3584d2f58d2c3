"""Where the stores of these tests are, and processes that publish to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compilecache.store import ArtifactStore

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Where a store is, for this process and others."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict)

    def open(self, budget_seconds: float = 20) -> ArtifactStore:
        """A new client of the store."""
        return ArtifactStore.open(
            self.url, budget_seconds=budget_seconds, storage_options=self.options
        )

    def task(self, seeds: list[int], *, size: int = 20_000, **more: object) -> dict[str, object]:
        """What a publisher in another process is to do here."""
        return {"url": self.url, "options": dict(self.options), "seeds": seeds, "size": size} | more


class Publishers:
    """Processes that are ready to publish, one a task; the end of the block waits for them."""

    def __init__(self, tasks: list[dict[str, object]], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, HERE / "publish_process.py", json.dumps(tasks), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        )

    def __enter__(self) -> Publishers:
        self.pids = [int(pid) for pid in self._process.stdout.readline().split()]
        assert self.pids
        return self

    def start(self, number: int) -> None:
        """Lets one of them publish."""
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def said(self, number: int) -> list[str]:
        """What the store held according to one of them: a line for each record, or error."""
        return (self._folder / f"{number}.out").read_text().splitlines()

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
