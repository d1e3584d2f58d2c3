"""Whether a store holds what its records promise; nothing is changed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compilecache.artifact import FileEntry
from compilecache.errors import ChecksumMismatch, PlanError, UnsafePath
from compilecache.fetch import SPARE_BYTES
from compilecache.findings import Finding, Kind
from compilecache.fingerprint import Fingerprint
from compilecache.holdings import FINGERPRINT, Holding, Place, Surveyor, named, old_probes
from compilecache.keeping import DAY
from compilecache.pack import unpack
from compilecache.progress import Teller
from compilecache.records import VERSION
from compilecache.signing import SIGNATURE_BYTES
from compilecache.store import ArtifactStore
from compilecache.taginspection import inspect_tags


@dataclass(slots=True)
class Inspection:
    """What was found in one place."""

    place: str
    """The address of the store, or the root."""
    fingerprints: int = 0
    records: int = 0
    packs: int = 0
    """Of a store."""
    tags: int = 0
    """Of a store."""
    files: int = 0
    """Of a root."""
    deep: bool = False
    """Whether contents were read."""
    findings: list[Finding] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """What was added, in words."""

    @property
    def damage(self) -> list[Finding]:
        """Findings that somebody will meet."""
        return [finding for finding in self.findings if not finding.harmless]

    def as_json(self) -> dict[str, object]:
        """For programs."""
        findings = [asdict(f) | {"harmless": f.harmless} for f in self.findings]
        return asdict(self) | {"findings": findings}


def inspect_store(
    store: ArtifactStore,
    *,
    deep: bool = False,
    grace: float = DAY,
    tell: Teller = lambda text: None,
) -> Inspection:
    """Looks at every record and pack. ``deep``: downloads each pack and checks every digest.

    Packs younger than ``grace`` seconds that no record names may wait for their record. Raises
    StoreUnavailable.
    """
    done = Inspection(store.url, deep=deep)
    surveyor = Surveyor(store)
    damaged: dict[str, dict[str, str]] = {}
    for fingerprint in store.fingerprints():
        holding = surveyor.look(fingerprint)
        done.fingerprints += 1
        done.records += len(holding.records) + len(holding.unreadable)
        done.packs += len(holding.packs)
        if deep:
            tell(f"reading the packs of {fingerprint[:12]}")
        bad = dict(_deep_faults(store, holding)) if deep else {}
        damaged[fingerprint] = bad
        done.findings += _records(holding, bad)
        done.findings += _signatures(store, holding)
        done.findings += _mark(store, holding)
        done.findings += _orphans(holding, grace)
    done.tags, findings = inspect_tags(store, damaged)
    done.findings += findings
    done.findings += _half_uploads(store, grace)
    for name in old_probes(store, time.time() - grace):
        done.findings.append(Finding("orphan", name, "doctor wrote it and could not delete it"))
    return done


def broken_places(holding: Holding, bad_packs: Collection[str]) -> dict[Place, tuple[str, str]]:
    """Records that cannot be restored → the object that is to blame, and what is wrong with it."""
    found = {place: (place.name, why) for place, why in holding.unreadable.items()}
    for place, record in holding.records.items():
        faults = holding.faults(record)
        blamed = sorted(named(record).intersection(bad_packs))
        if faults:
            found[place] = (place.name, "; ".join(faults))
        elif blamed:
            found[place] = (place.name, f"pack {blamed[0][:12]} is damaged")
    return found


def _records(holding: Holding, bad: dict[str, str]) -> Iterator[Finding]:
    broken = broken_places(holding, bad)
    newest = holding.newest_whole(broken)
    for place, (where, what) in sorted(broken.items(), key=lambda item: item[0].name):
        whole = newest.get(place.key)
        kind: Kind = "record" if place in holding.unreadable else "pack"
        if place in holding.foreign:
            kind = "foreign"
        elif whole is not None and whole.generation > place.generation:
            kind = "superseded"
        blamed = [bad[pack] for pack in sorted(bad) if f"{pack[:12]} is damaged" in what]
        yield Finding(kind, where, "; ".join(blamed) or what, holding.fingerprint, place.key)


def _signatures(store: ArtifactStore, holding: Holding) -> Iterator[Finding]:
    signers = holding.signers()
    for name, (place, key_id) in sorted(holding.signatures().items()):
        size = holding.objects[name].size
        if size == SIGNATURE_BYTES or place.name not in holding.objects:
            continue
        later = any(
            other.key == place.key
            and other.generation > place.generation
            and key_id in signers.get(other, set())
            for other in holding.records
        )
        what = f"has {size} bytes instead of {SIGNATURE_BYTES}"
        kind: Kind = "superseded" if later else "signature"
        yield Finding(kind, name, what, holding.fingerprint, place.key)
    if not store.trusts:
        return
    view = store.latest(holding.fingerprint)
    for text in view.untrusted:
        key, _, what = text.partition(", ")
        if key not in view.records:
            yield Finding("signature", f"artifacts/{key}", what, holding.fingerprint, key)


def _deep_faults(store: ArtifactStore, holding: Holding) -> Iterator[tuple[str, str]]:
    """sha256 of packs that are not what they should be, and what is wrong."""
    wanted, clashes = _wanted(holding)
    yield from clashes.items()
    for sha256, entries in sorted(wanted.items()):
        if sha256 not in holding.packs or sha256 in clashes:
            continue
        with tempfile.TemporaryDirectory(prefix="compilecache-fsck-") as folder:
            try:
                with store.open_pack(holding.fingerprint, sha256) as stream:
                    unpack(stream, sha256, entries, Path(folder), spare_bytes=SPARE_BYTES)
            except ChecksumMismatch as error:
                more = f"; and {len(error.faults) - 1} more" if len(error.faults) > 1 else ""
                yield sha256, f"{error.faults[0]}{more}"
            except UnsafePath as error:
                yield sha256, error.problem


def _wanted(holding: Holding) -> tuple[dict[str, dict[str, FileEntry]], dict[str, str]]:
    """By pack: the files that records find in it; and packs of which two records disagree."""
    wanted: dict[str, dict[str, FileEntry]] = {}
    clashes: dict[str, str] = {}
    for record in holding.records.values():
        for entry in record.files:
            known = wanted.setdefault(entry.pack, {}).setdefault(entry.path, entry)
            if known != entry:
                clashes[entry.pack] = f"records disagree about {entry.path}"
    return wanted, clashes


def _mark(store: ArtifactStore, holding: Holding) -> Iterator[Finding]:
    text = store.get_fingerprint(holding.fingerprint)
    if text is None:
        if holding.records or holding.unreadable:
            yield Finding("fingerprint", FINGERPRINT, "missing", holding.fingerprint)
        return
    try:
        digest = Fingerprint.parse(text).digest
    except PlanError as error:
        yield Finding("fingerprint", FINGERPRINT, error.problem, holding.fingerprint)
        return
    if digest != holding.fingerprint:
        what = f"it has the digest {digest[:12]}"
        yield Finding("fingerprint", FINGERPRINT, what, holding.fingerprint)


def _orphans(holding: Holding, grace: float) -> Iterator[Finding]:
    for name in holding.loose_signatures(time.time(), grace):
        yield Finding("orphan", name, "its record is gone", holding.fingerprint)
    for name in holding.free_packs(time.time(), grace):
        what = f"no record names it ({holding.objects[name].size} bytes)"
        yield Finding("orphan", name, what, holding.fingerprint)


def _half_uploads(store: ArtifactStore, grace: float) -> Iterator[Finding]:
    try:
        found = store.storage.half_uploads(VERSION)
    except OSError:  # not every store lists them
        return
    for name, stored in sorted(found.items()):
        if stored.modified <= time.time() - grace:
            where = name.removeprefix(f"{VERSION}/")
            fingerprint, _, rest = where.partition("/")
            yield Finding("half upload", rest, "began and never ended", fingerprint)
