"""One plan, the very bytes that each of its targets has, and what is wrong with a root or a store of it."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from workloads import plan

from compilecache.artifact import Record
from compilecache.cachedir import CacheDir
from compilecache.contents import TRANSIENT
from compilecache.errors import CompileCacheError
from compilecache.fetch import fetch_packs
from compilecache.records import StoreView
from compilecache.rootfolder import OWN
from compilecache.shapes import CompileTarget, ShapePlan
from compilecache.store import ArtifactStore

SHARED = "ab/cshared.bin"
"""A file that every target needs: later records lean on the pack of the first."""


@dataclass(frozen=True)
class Scene:
    """What a warm-up has to make. Equal scenes have equal bytes."""

    seed: str
    count: int = 4
    """Targets."""
    size: int = 60_000
    """Bytes of the largest file of each."""

    @cached_property
    def plan(self) -> ShapePlan:
        """As a user would write it."""
        return plan("product", list(range(2, 2 + self.count)))

    @cached_property
    def targets(self) -> dict[str, CompileTarget]:
        """By key."""
        return {target.key: target for target in self.plan.targets(["cpu"])}

    def files(self, key: str) -> dict[str, bytes]:
        """What compiling a target writes."""
        return {
            f"fxgraph/{key[-2:]}/f{key}/entry": self._bytes(f"{key} entry", self.size // 10),
            f"{key[-2:]}/c{key}.bin": self._bytes(f"{key} code", self.size),
            f"{key[-2:]}/c{key}.empty": b"",
            SHARED: self._bytes("shared", self.size // 3),
        }

    @cached_property
    def truth(self) -> Mapping[str, bytes]:
        """Every file that there can be in a root, by name."""
        return {name: data for key in self.targets for name, data in self.files(key).items()}

    def _bytes(self, name: str, size: int) -> bytes:
        return random.Random(f"{self.seed} {name}").randbytes(size)

    # -- what is wrong --------------------------------------------------------------------------

    def wrong_in_root(self, root: Path) -> list[str]:
        """Files that are there under a name torch would read and are not whole; records without theirs."""
        cache = CacheDir(root)
        names = {name for name in cache.files() if not TRANSIENT.search(name)}
        found = [
            f"{name} in the root is damaged"
            for name in sorted(names)
            if (root / name).read_bytes() != self.truth.get(name)
        ]
        for path in sorted(root.glob(f"{OWN}/records/*/*.json")):
            record = Record.parse(path.read_bytes())
            found += [f"{path.name}: {fault}" for fault in self._wrong_in_record(record, names)]
        return found

    def _wrong_in_record(self, record: Record, names: Collection[str]) -> Iterator[str]:
        own = self.files(record.key)
        if {entry.path: entry.size for entry in record.files} != {
            n: len(b) for n, b in own.items()
        }:
            yield "the record lists other files"
        for name in sorted(own.keys() - names):
            yield f"{name} is recorded and not there"

    def wrong_in_store(self, store: ArtifactStore, scratch: Path) -> list[str]:
        """Packs that are not what their name says, and records that do not give the very bytes."""
        found = []
        for fingerprint in store.fingerprints():
            view = store.latest(fingerprint)
            found += [f"record: {fault}" for fault in view.faults]
            packs = store.storage.walk(f"v1/{fingerprint}/packs")
            for name in sorted(packs):
                data = store.storage.read(f"v1/{fingerprint}/packs/{name}", packs[name] + 1)
                if hashlib.sha256(data).hexdigest() != name.partition(".")[0]:
                    found.append(f"pack {name[:12]} is damaged")
            wrong = self._unusable(store, fingerprint, view, set(view.records), scratch)
            found += [f"published {key} does not come back" for key in wrong]
        return found

    def lost(self, store: ArtifactStore, keys: Collection[str], scratch: Path) -> list[str]:
        """Those of these targets that the store does not give back, byte by byte."""
        for fingerprint in store.fingerprints():
            view = store.latest(fingerprint, keys)
            return self._unusable(store, fingerprint, view, keys, scratch)
        return sorted(keys)

    def _unusable(
        self,
        store: ArtifactStore,
        fingerprint: str,
        view: StoreView,
        keys: Collection[str],
        scratch: Path,
    ) -> list[str]:
        return [
            key
            for key in sorted(keys)
            if key not in view.records
            or not self._comes_back(store, fingerprint, view.records[key], scratch)
        ]

    def _comes_back(
        self, store: ArtifactStore, fingerprint: str, record: Record, scratch: Path
    ) -> bool:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            fetch_packs(store, fingerprint, record.files, scratch)
        except CompileCacheError:
            return False
        own = self.files(record.key)
        found = {p.relative_to(scratch).as_posix(): p for p in scratch.rglob("*") if p.is_file()}
        return found.keys() == own.keys() and all(found[n].read_bytes() == own[n] for n in own)
