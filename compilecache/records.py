"""The records of a store: which one is in force, who signed it, and adding one.

A record lies at ``artifacts/<key>/<generation>.json``, its signatures beside it. Everything is created,
nothing changed: whoever comes second reads what is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from compilecache.artifact import Record, is_key
from compilecache.calls import Calls
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    StoreUnavailable,
    UnsafePath,
    UntrustedArtifact,
)
from compilecache.signing import NOBODY, Keys, SignKey, signature_name, signature_of
from compilecache.sweeps import renew
from compilecache.vouching import Vouching, refusal

VERSION = "v1"
DIGEST = re.compile(r"[0-9a-f]{8,128}")
GENERATIONS_TRIED = 64
GLANCED = 10
"""Names that are worth reading, for each target that is wanted, to ask once instead of for each."""

_GENERATION = re.compile(r"([1-9][0-9]{0,9})\.json")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One published target, as ``ls`` shows it."""

    key: str
    """The target's key."""
    generation: int
    """Which of its records is in force."""
    created: str
    """UTC, ISO."""
    files: int
    """How many files it needs."""
    file_bytes: int
    """What they weigh restored."""
    pack_bytes: int
    """What its own pack weighs; 0 when other packs hold its files."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """What a store holds for one fingerprint, at one moment."""

    records: Mapping[str, Record]
    """By key: the readable, trusted record of the highest generation."""
    faults: tuple[str, ...]
    """Records that could not be read, and why; an older generation stands in where there is one."""
    untrusted: tuple[str, ...] = ()
    """Records that no trusted key signed, and why; the same holds for them."""

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        """One line for each record, by key."""
        return tuple(_entry(record) for _, record in sorted(self.records.items()))


def _entry(record: Record) -> StoreEntry:
    return StoreEntry(
        key=record.key,
        generation=record.generation,
        created=record.created,
        files=len(record.files),
        file_bytes=sum(entry.size for entry in record.files),
        pack_bytes=record.pack.size if record.pack else 0,
    )


@dataclass(frozen=True, slots=True)
class Signed:
    """What was signed of the records in force for one fingerprint."""

    keys: tuple[str, ...]
    """Of targets that this key had not signed before."""
    known: int
    """How many it had."""
    refused: tuple[str, ...]
    """Records that were passed over, and why."""


@dataclass(slots=True)
class _Listed:
    """What there is of one target."""

    generations: list[int] = field(default_factory=list)
    signers: dict[int, set[str]] = field(default_factory=dict)
    """By generation: ids of the keys of which there are signatures, good or not."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record as it lies in a store."""

    record: Record
    name: str
    data: bytes
    """Its bytes there; this is what gets signed."""

    @property
    def sha256(self) -> str:
        """Of those bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()


class Records:
    """The records that lie in one storage, as far as these keys trust them."""

    def __init__(self, calls: Calls, keys: Keys) -> None:
        self._calls = calls
        self._keys = keys
        self._vouching = Vouching(calls, keys)

    # -- reading ------------------------------------------------------------------------------

    def latest(self, fingerprint: str, keys: Collection[str] | None) -> StoreView:
        """The record in force of each of these targets; of all, when ``keys`` is None.

        With trusted keys nothing of a record is believed before its signature has been verified.
        """
        listed = self._listed(fingerprint, keys)
        searches = {key: _Search(self._calls, self._keys, fingerprint, key) for key in listed}
        found = self._calls.each(sorted(listed), lambda key: searches[key].newest(listed[key]))
        return StoreView(
            records={each.record.key: each.record for each in found if each is not None},
            faults=tuple(sorted(f for s in searches.values() for f in s.faults)),
            untrusted=tuple(sorted(f for s in searches.values() for f in s.untrusted)),
        )

    def exact(self, fingerprint: str, key: str, generation: int) -> Found | None:
        """One generation of a target, in force or not; None when it is absent.

        Raises ChecksumMismatch, UnsafePath and UntrustedArtifact for one that cannot be used.
        """
        listed = self._listed(fingerprint, [key]).get(key, _Listed())
        search = _Search(self._calls, self._keys, fingerprint, key)
        return search.read(generation, listed.signers.get(generation, set()))

    def pinned(self, fingerprint: str, key: str, generation: int, sha256: str) -> Record | None:
        """The generation of a target that has these very bytes; None when it is absent.

        Whoever names it by its digest vouches for it: signatures are not looked at. Raises
        ChecksumMismatch for other bytes.
        """
        everybody = _Search(self._calls, NOBODY, fingerprint, key)
        found = everybody.read(generation, ())
        if found is not None and found.sha256 != sha256:
            problem = f"{key}, generation {generation}, has other bytes than were named"
            step = "Do not use this store, or name what it holds now"
            raise ChecksumMismatch(problem, next_step=step, faults=(problem,))
        return None if found is None else found.record

    def published(self, fingerprint: str) -> frozenset[str]:
        """Keys of all targets that have a record, signed or not, from one listing."""
        return frozenset(self._listed(fingerprint, None))

    def highest(self, fingerprint: str, key: str) -> int:
        """The highest generation of a target of which there is a record, readable or not, or a
        signature that outlived its record; 0 when there is none."""
        files = self._calls.walk(f"{folder_of(fingerprint)}/artifacts/{key}")
        found = [int(match[1]) for match in map(_GENERATION.fullmatch, files) if match]
        found += [signature[0] for signature in map(signature_of, files) if signature]
        return max(found, default=0)

    def _listed(self, fingerprint: str, keys: Collection[str] | None) -> dict[str, _Listed]:
        """By key: what there is of those targets that have a record."""
        found: dict[str, _Listed] = {}
        for name in self._names(f"{folder_of(fingerprint)}/artifacts", keys):
            key, _, file = name.partition("/")
            listed = found.get(key) or _Listed()
            if match := _GENERATION.fullmatch(file):
                listed.generations.append(int(match[1]))
            elif signature := signature_of(file):
                listed.signers.setdefault(signature[0], set()).add(signature[1])
            if is_key(key):
                found[key] = listed
        return {key: listed for key, listed in found.items() if listed.generations}

    def _names(self, folder: str, keys: Collection[str] | None) -> list[str]:
        if keys is None:
            return self._calls.walk(folder)

        wanted = set(filter(is_key, keys))
        if len(wanted) > 1:
            glanced = self._calls.glance(folder, GLANCED * len(wanted))
            if glanced is not None:
                return [name for name in glanced if name.partition("/")[0] in wanted]

        def listing(key: str) -> list[str]:
            return [f"{key}/{name}" for name in self._calls.walk(f"{folder}/{key}")]

        found = self._calls.each(sorted(wanted), listing)
        return [name for names in found for name in names]

    # -- adding -------------------------------------------------------------------------------

    def add(self, record: Record) -> Record:
        """Writes a record, and its signature, at its generation or the next free one above.

        Returns what is there now: this one, or somebody else's of the same content.
        """
        highest = self.highest(record.fingerprint, record.key)
        for generation in range(
            record.generation, max(record.generation, highest) + GENERATIONS_TRIED
        ):
            candidate = record.model_copy(update={"generation": generation})
            stored = self._settle(candidate, may_write=generation > highest)
            if stored is not None:
                return stored
        raise StoreUnavailable(
            f"store '{self._calls.storage.url}' does not keep the record of {record.key}: "
            f"{GENERATIONS_TRIED} generations from {record.generation} on read back as something else",
            next_step="Check that the address is a store and not some other server",
        )

    def _settle(self, record: Record, *, may_write: bool) -> Record | None:
        """What is stored at this generation when its content is the record's; None otherwise.

        A generation that is absent below the highest was superseded and collected: it stays so.
        """
        name = _name((record.fingerprint, record.key, record.generation))
        data = self._calls.read(name)
        was_there = data is not None
        if data is None and may_write:
            self._calls.create(f"record {record.key}", name, record.dump())
            # s3fs#973: some stores ignore "only if absent"; what counts is what can be read back.
            data = self._calls.read(name)
        if data is None:
            return None
        try:
            stored = Record.parse(data)
        except (ChecksumMismatch, UnsafePath):
            return None
        if not stored.same_content(record) or stored.generation != record.generation:
            return None
        signer = self._keys.signer
        if signer is not None and self._sign(signer, Found(stored, name, data)) is None:
            return None
        if was_there:
            renew(self._calls.storage, self._calls.call, folder_of(record.fingerprint))
        return stored

    def holds(self, record: Record) -> bool:
        """Whether a record that was added is there still, with the signature that was added to it."""
        names = [_name((record.fingerprint, record.key, record.generation))]
        if self._keys.signer is not None:
            names.append(signature_name(names[0], self._keys.signer.public))
        return all(self._calls.size("record lookup", name) is not None for name in names)

    def there(self, record: Record) -> bool:
        """Whether a record is there still, whoever has signed it."""
        name = _name((record.fingerprint, record.key, record.generation))
        return self._calls.size("record lookup", name) is not None

    def sign(self, signer: SignKey, fingerprint: str, *, unsigned: bool) -> Signed:
        """Adds a signature to the record in force of each target, if a trusted key signed it.

        ``unsigned``: whatever is in force is vouched for.
        """
        keys = NOBODY if unsigned else self._keys
        new: dict[str, bool | None] = {}
        refused: list[str] = []
        for key, listed in sorted(self._listed(fingerprint, None).items()):
            search = _Search(self._calls, keys, fingerprint, key)
            if (found := search.newest(listed)) is not None:
                new[key] = self._sign(signer, found)
            refused += (*search.untrusted, *search.faults)
        refused += [
            f"{key}: something else lies in place of the signature"
            for key, is_new in new.items()
            if is_new is None
        ]
        return Signed(
            keys=tuple(key for key, is_new in new.items() if is_new),
            known=sum(is_new is False for is_new in new.values()),
            refused=tuple(refused),
        )

    def _sign(self, signer: SignKey, found: Found) -> bool | None:
        return self._vouching.sign(signer, found.name, found.data, found.record.key)


class _Search:
    """Looks for the record in force of one target."""

    def __init__(self, calls: Calls, keys: Keys, fingerprint: str, key: str) -> None:
        self._calls = calls
        self._keys = keys
        self._place = (fingerprint, key)
        self.faults: list[str] = []
        self.untrusted: list[str] = []

    def newest(self, listed: _Listed) -> Found | None:
        """The highest generation that can be read and is trusted; the others are noted."""
        for generation in sorted(listed.generations, reverse=True):
            try:
                found = self.read(generation, listed.signers.get(generation, set()))
            except (ChecksumMismatch, UnsafePath, UntrustedArtifact) as error:
                noted = self.untrusted if isinstance(error, UntrustedArtifact) else self.faults
                noted.append(f"{self._place[1]}, generation {generation}: {error.problem}")
                continue
            if found is not None:
                return found
        return None

    def read(self, generation: int, signers: Collection[str]) -> Found | None:
        """One generation; None when it is absent. Raises what makes it unusable."""
        place = (*self._place, generation)
        name = _name(place)
        data = Vouching(self._calls, self._keys).read(name, signers)
        if data is None:
            return None
        record = Record.parse(data)
        if (record.fingerprint, record.key, record.generation) != place:
            raise _misplaced(signed=bool(self._keys.trusted))
        return Found(record, name, data)


def _misplaced(*, signed: bool) -> CompileCacheError:
    problem = "the record names another place"
    if signed:
        return refusal(problem)
    return ChecksumMismatch(problem, next_step="Publish the target again", faults=(problem,))


def folder_of(fingerprint: str) -> str:
    """Where everything of a fingerprint lies."""
    if not DIGEST.fullmatch(fingerprint):
        raise ValueError(f"{fingerprint[:80]!r} is no digest of a fingerprint")
    return f"{VERSION}/{fingerprint}"


def _name(place: tuple[str, str, int]) -> str:
    fingerprint, key, generation = place
    return f"{folder_of(fingerprint)}/artifacts/{key}/{generation}.json"
