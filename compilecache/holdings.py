"""What a store holds for one fingerprint, object by object, at one moment: for gc and fsck."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from compilecache.artifact import Record
from compilecache.calls import OBJECT_BYTES
from compilecache.doctor.store import FOLDER as PROBES
from compilecache.errors import ChecksumMismatch, UnsafePath
from compilecache.records import VERSION
from compilecache.storage import Stored
from compilecache.store import ArtifactStore
from compilecache.sweeps import FOLDER as SWEEPS
from compilecache.tags import Tag
from compilecache.tagstore import Shelf

_RECORD = re.compile(r"artifacts/([^/]+)/([1-9][0-9]{0,9})\.json")
_GENERATION = re.compile(r"artifacts/([^/]+)/([1-9][0-9]{0,9})\..*")
"""A record, or what lies beside it: its signatures."""
_SIGNATURE = re.compile(r"artifacts/([^/]+)/([1-9][0-9]{0,9})\.([0-9a-f]{16})\.sig")
_PACK = re.compile(r"packs/([0-9a-f]{64})\.tar\.zst")
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True, slots=True)
class Place:
    """A generation of a target."""

    key: str
    generation: int

    @property
    def name(self) -> str:
        """Its record, relative to the fingerprint."""
        return f"artifacts/{self.key}/{self.generation}.json"


@dataclass(frozen=True, slots=True)
class Holding:
    """Everything below one fingerprint. Ages are seconds."""

    fingerprint: str
    """Digest."""
    objects: Mapping[str, Stored]
    """By name, relative to the fingerprint's folder."""
    records: Mapping[Place, Record]
    """Those that can be read and belong where they lie."""
    unreadable: Mapping[Place, str]
    """Those that cannot, and why."""
    foreign: frozenset[Place]
    """Of those: records in a format that another version writes."""
    kept: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """Records that tags name → the full names of these tags."""
    unjudged: str | None = None
    """A tag that cannot be read, so that nobody knows what it needs."""

    @property
    def bytes(self) -> int:
        """What all of it weighs."""
        return sum(stored.size for stored in self.objects.values())

    @property
    def packs(self) -> dict[str, Stored]:
        """By sha256: the packs that are there."""
        found = ((_PACK.fullmatch(name), stored) for name, stored in self.objects.items())
        return {match[1]: stored for match, stored in found if match}

    def signatures(self) -> dict[str, tuple[Place, str]]:
        """By name: the signatures that are there, good or not: of which generation, by which key."""
        found = ((name, _SIGNATURE.fullmatch(name)) for name in self.objects)
        return {name: (Place(m[1], int(m[2])), m[3]) for name, m in found if m}

    def signers(self) -> dict[Place, set[str]]:
        """By generation: ids of the keys of which there are signatures."""
        found: dict[Place, set[str]] = {}
        for place, key_id in self.signatures().values():
            found.setdefault(place, set()).add(key_id)
        return found

    def loose_signatures(self, now: float, grace: float) -> list[str]:
        """Signatures older than the grace time whose record is gone."""
        return sorted(
            name
            for name, (place, _) in self.signatures().items()
            if place.name not in self.objects and self.objects[name].modified <= now - grace
        )

    @property
    def youngest_record(self) -> float:
        """When the youngest record was written; without records, the youngest object."""
        records = [place.name for place in (*self.records, *self.unreadable)]
        return self._latest(records or self.objects)

    def touched(self) -> float:
        """When the youngest object was written; marks of collectors do not count."""
        return self._latest(name for name in self.objects if not name.startswith(f"{SWEEPS}/"))

    def leased(self, now: float, grace: float) -> bool:
        """Whether somebody claims a target: whatever they are about to need stays."""
        return self._latest(n for n in self.objects if n.startswith("claims/")) > now - grace

    def _latest(self, names: Iterable[str]) -> float:
        return max((self.objects[name].modified for name in names), default=0.0)

    def faults(self, record: Record) -> tuple[str, ...]:
        """What is wrong with the packs that a record names, as far as names and sizes tell."""
        packs, sizes = self.packs, self._sizes()
        found = []
        for sha256 in sorted(named(record)):
            stored, size = packs.get(sha256), sizes.get(sha256)
            if stored is None:
                found.append(f"pack {sha256[:12]} is missing")
            elif size is not None and size != stored.size:
                found.append(f"pack {sha256[:12]} has {stored.size} bytes instead of {size}")
        return tuple(found)

    def _sizes(self) -> dict[str, int]:
        own = (record.pack for record in self.records.values())
        return {pack.sha256: pack.size for pack in own if pack is not None}

    def newest_whole(self, broken: Collection[Place] = ()) -> dict[str, Place]:
        """By key: the highest generation that can be read and whose packs are there.

        ``broken``: places that are known to be worse than that.
        """
        found: dict[str, Place] = {}
        for place in sorted(self.records, key=lambda place: place.generation):
            if place not in broken and not self.faults(self.records[place]):
                found[place.key] = place
        return found

    def superseded(self, now: float, grace: float) -> list[str]:
        """Objects of generations below a whole one that everybody has had time to find.

        What somebody signed is superseded only by what they signed too: who trusts them alone does
        not use the other. Signatures whose record is gone go in any case.
        """
        old = [name for name, stored in self.objects.items() if stored.modified <= now - grace]
        signers, better = self.signers(), self._better(now - grace)
        names = set(self.loose_signatures(now, grace))
        for name in old:
            place = place_of(name, _GENERATION)
            if place is None or Place(place.key, place.generation) in self.kept:
                continue
            if any(
                other.generation > place.generation
                and signers.get(place, set()) <= signers.get(other, set())
                for other in better.get(place.key, ())
            ):
                names.add(name)
        return sorted(names, key=order)

    def _better(self, latest: float) -> dict[str, list[Place]]:
        """By key: whole generations that have been there since then, with all their signatures."""
        young = {
            place_of(name, _GENERATION)
            for name, stored in self.objects.items()
            if stored.modified > latest
        }
        found: dict[str, list[Place]] = {}
        for place, record in self.records.items():
            if place not in young and not self.faults(record):
                found.setdefault(place.key, []).append(place)
        return found

    def free_packs(self, now: float, grace: float, without: Collection[str] = ()) -> list[str]:
        """Packs that no record names, older than the grace time.

        None while a record cannot be read: nobody knows what it names. ``without``: records, by
        name, that are on their way out.
        """
        if any(place.name not in without for place in self.unreadable):
            return []
        needed: set[str] = set()
        for place, record in self.records.items():
            if place.name not in without:
                needed |= named(record)
        return sorted(
            f"packs/{sha256}.tar.zst"
            for sha256, stored in self.packs.items()
            if sha256 not in needed and stored.modified <= now - grace
        )


def named(record: Record) -> set[str]:
    """The packs that a record needs."""
    own = {record.pack.sha256} if record.pack else set()
    return {entry.pack for entry in record.files} | own


def order(name: str) -> tuple[int, str, int, str]:
    """In which order objects go: older generations, newer ones, packs, claims, what it stood for.

    A record goes before its signatures: nobody sees it without them.
    """
    place = place_of(name, _GENERATION)
    if place is not None:
        return 0, place.key, place.generation, "" if name == place.name else name
    folders = ("artifacts/", "packs/", "claims/")
    rank = next((i for i, folder in enumerate(folders) if name.startswith(folder)), len(folders))
    return rank + 1 + (name == FINGERPRINT), "", 0, name


def place_of(name: str, pattern: re.Pattern[str] = _RECORD) -> Place | None:
    """Which generation of which target an object belongs to."""
    match = pattern.fullmatch(name)
    return Place(match[1], int(match[2])) if match else None


def old_probes(store: ArtifactStore, latest: float) -> list[str]:
    """Objects that ``doctor`` wrote by then, and could not delete. Raises StoreUnavailable."""
    found = store.call("listing probes", lambda: store.storage.survey(PROBES))
    return sorted(f"{PROBES}/{name}" for name, stored in found.items() if stored.modified <= latest)


class Surveyor:
    """Looks at the fingerprints of a store; a record that was read is not read again."""

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self._known: dict[tuple[str, str, Stored], Record | str] = {}

    def look(self, fingerprint: str) -> Holding:
        """What is there now. Raises StoreUnavailable."""
        folder = f"{VERSION}/{fingerprint}"
        objects = self.store.call("listing", lambda: self.store.storage.survey(folder))
        records: dict[Place, Record] = {}
        unreadable: dict[Place, str] = {}
        foreign = set()
        for name, stored in sorted(objects.items()):
            place = place_of(name)
            read = None if place is None else self._read(fingerprint, place, stored)
            if place is None or read is None:
                continue
            if isinstance(read, Record):
                records[place] = read
                continue
            unreadable[place] = read
            if read.startswith("record has format "):
                foreign.add(place)
        shelf = self.store.tags.shelf(unsigned=True)
        kept, unjudged = _tagged(shelf, fingerprint)
        return Holding(
            fingerprint, objects, records, unreadable, frozenset(foreign), kept, unjudged
        )

    def _read(self, fingerprint: str, place: Place, stored: Stored) -> Record | str | None:
        known = (fingerprint, place.name, stored)
        if known not in self._known:
            name = f"{VERSION}/{fingerprint}/{place.name}"
            storage = self.store.storage
            try:
                data = self.store.call("reading", lambda: storage.read(name, OBJECT_BYTES))
            except FileNotFoundError:
                return None
            self._known[known] = _parsed(fingerprint, place, data)
        return self._known[known]


def _tagged(shelf: Shelf, fingerprint: str) -> tuple[dict[Place, tuple[str, ...]], str | None]:
    """What tags keep of a fingerprint, whoever signed them; and a tag that cannot be read."""
    kept: dict[Place, tuple[str, ...]] = {}
    unjudged = None
    for entry in shelf.live:
        if not isinstance(entry.content, Tag):
            unjudged = unjudged or entry.full_name
        elif entry.content.fingerprint == fingerprint:
            for record in entry.content.records:
                place = Place(record.key, record.generation)
                kept[place] = (*kept.get(place, ()), entry.full_name)
    return kept, unjudged


def _parsed(fingerprint: str, place: Place, data: bytes) -> Record | str:
    """The record, or what is wrong with it."""
    try:
        record = Record.parse(data)
    except (ChecksumMismatch, UnsafePath) as error:
        return error.problem
    own = (record.fingerprint, record.key, record.generation)
    if own != (fingerprint, place.key, place.generation):
        return "the record names another place"
    return record
