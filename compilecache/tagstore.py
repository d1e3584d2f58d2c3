"""The tags of a store: found, listed, added, released. Everything is created, nothing changed.

Layout below the root::

    v1/tags/<name>/<generation>.json              a tag, or the release of earlier ones
                  /<generation>.<key id>.sig      written after it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from compilecache.calls import Calls
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    PlanError,
    StoreUnavailable,
    UntrustedArtifact,
)
from compilecache.records import GENERATIONS_TRIED, VERSION
from compilecache.signing import Keys, signature_of
from compilecache.storage import Stored
from compilecache.tags import Entry, LaterFormat, Release, Tag, parse_entry, parse_name
from compilecache.vouching import Vouching, refusal

FOLDER = f"{VERSION}/tags"

_ENTRY = re.compile(r"([^/]+)/([1-9][0-9]{0,9})\.json")
_SIGNATURE = re.compile(r"([^/]+)/([^/]+\.sig)")

E = TypeVar("E", Tag, Release)


@dataclass(frozen=True, slots=True)
class Shelved:
    """One generation of a name, as it lies in a store."""

    name: str
    generation: int
    content: Entry | None
    """None when it cannot be read, or may not be believed."""
    error: CompileCacheError | None = None
    """Why it cannot be read."""
    untrusted: str = ""
    """Why no trusted key vouches for it; empty when one does, or everybody is believed."""

    @property
    def full_name(self) -> str:
        """The name that means this generation."""
        return f"{self.name}@{self.generation}"

    @property
    def later(self) -> bool:
        """Whether a later version of compilecache wrote it."""
        return isinstance(self.error, LaterFormat)


@dataclass(frozen=True, slots=True)
class Shelf:
    """All there is of some names, at one moment."""

    entries: tuple[Shelved, ...]
    """By name and generation."""

    @property
    def released(self) -> frozenset[tuple[str, int]]:
        """Names and generations that somebody who is believed has let go."""
        return frozenset(
            (entry.name, generation)
            for entry in self.entries
            if isinstance(entry.content, Release) and not entry.untrusted
            for generation in entry.content.releases
        )

    @property
    def live(self) -> tuple[Shelved, ...]:
        """Tags that were not released; those that cannot be read among them."""
        released = self.released
        return tuple(
            entry
            for entry in self.entries
            if not isinstance(entry.content, Release)
            and (entry.name, entry.generation) not in released
        )

    @property
    def tags(self) -> tuple[Tag, ...]:
        """Those that can be used."""
        return tuple(e.content for e in self.live if isinstance(e.content, Tag) and not e.untrusted)


@dataclass(frozen=True, slots=True)
class Found:
    """What a name means."""

    tag: Tag
    passed_over: tuple[str, ...] = ()
    """Younger ones of the name that cannot be used, and why."""


class Tags:
    """The tags in one storage, as far as these keys trust them. Raises StoreUnavailable."""

    def __init__(self, calls: Calls, keys: Keys) -> None:
        self._calls = calls
        self._keys = keys
        self._vouching = Vouching(calls, keys)
        self._known: dict[tuple[str, Stored], Entry | ChecksumMismatch] = {}

    # -- reading ------------------------------------------------------------------------------

    def shelf(self, name: str | None = None, *, unsigned: bool = False) -> Shelf:
        """What there is of a name, or of all. ``unsigned``: what nobody vouches for is read too."""
        objects = self._survey(name)
        signers: dict[tuple[str, int], set[str]] = {}
        for path in objects:
            match = _SIGNATURE.fullmatch(path)
            if match and (signed := signature_of(match[2])):
                signers.setdefault((match[1], signed[0]), set()).add(signed[1])
        places = [(m[1], int(m[2])) for path in objects if (m := _ENTRY.fullmatch(path))]

        def read(place: tuple[str, int]) -> Shelved | None:
            stored = objects[f"{place[0]}/{place[1]}.json"]
            return self._read(place, stored, signers.get(place, set()), unsigned)

        found = self._calls.each(sorted(places), read)
        return Shelf(tuple(entry for entry in found if entry is not None))

    def find(self, text: str) -> Found:
        """What "NAME" (its youngest that can be used) or "NAME@2" means.

        Raises PlanError for a name that is none, or that nothing has; ChecksumMismatch and
        UntrustedArtifact when none of it can be used.
        """
        name, generation = parse_name(text)
        live = [e for e in self.shelf(name).live if generation in (None, e.generation)]
        passed: list[CompileCacheError] = []
        for entry in reversed(live):
            problem = _problem(entry)
            if problem is None and isinstance(entry.content, Tag):
                return Found(entry.content, tuple(error.problem for error in passed))
            passed += [problem] if problem else []
        if passed:
            raise passed[0]
        raise self._unknown(text, name, generation)

    def _unknown(self, text: str, name: str, generation: int | None) -> PlanError:
        url = self._calls.storage.url
        mine = [tag.full_name for tag in self.shelf(name).tags]
        if generation is not None and mine:
            return PlanError(
                f"store '{url}' has no tag '{text}' (any more)",
                next_step=f"Choose among {', '.join(mine[-5:])}",
                field="NAME",
            )
        names = {tag.name for tag in self.shelf().tags}
        near = get_close_matches(name, names, n=3, cutoff=0.4)
        return PlanError(
            f"store '{url}' has no tag '{text}'",
            next_step=f"Did you mean {' or '.join(near)}"
            if near
            else "See 'compilecache tag --list'; a working run is named with 'compilecache tag NAME'",
            field="NAME",
        )

    def _survey(self, name: str | None) -> dict[str, Stored]:
        folder = FOLDER if name is None else f"{FOLDER}/{name}"
        storage = self._calls.storage
        found = self._calls.call("listing tags", lambda: storage.survey(folder))
        return found if name is None else {f"{name}/{path}": s for path, s in found.items()}

    def _read(
        self, place: tuple[str, int], stored: Stored, signers: Collection[str], unsigned: bool
    ) -> Shelved | None:
        path = _path(*place)
        untrusted = ""
        if not self._keys.trusted and (path, stored) in self._known:
            return _shelved(place, self._known[path, stored])
        try:
            data = self._vouching.read(path, signers)
        except UntrustedArtifact as error:
            untrusted = error.problem
            if not unsigned:
                return Shelved(*place, None, untrusted=untrusted)
            data = self._calls.read(path)
        if data is None:
            return None
        if (path, stored) not in self._known:
            self._known[path, stored] = _parsed(data, place)
        return _shelved(place, self._known[path, stored], untrusted)

    # -- adding -------------------------------------------------------------------------------

    def add(self, entry: E) -> E:
        """Writes a tag or a release, and its signature, at the next free generation of its name.

        Raises UntrustedArtifact when only signed ones count and there is no key to sign with.
        """
        self._refuse_unsigned(entry.full_name if isinstance(entry, Tag) else entry.name)
        first = self._highest(entry.name) + 1
        for generation in range(first, first + GENERATIONS_TRIED):
            mine = entry.model_copy(update={"generation": generation})
            if self._settle(mine):
                return mine
        raise StoreUnavailable(
            f"store '{self._calls.storage.url}' does not keep tag '{entry.name}': what is written "
            "reads back as something else",
            next_step="Check that the address is a store and not some other server",
        )

    def _settle(self, entry: Entry) -> bool:
        """Whether these very bytes lie at the entry's place now, signed."""
        path, data = _path(entry.name, entry.generation), entry.dump()
        self._calls.create(f"tag {entry.name}", path, data)
        if self._calls.read(path) != data:
            return False
        signer = self._keys.signer
        return signer is None or self._vouching.sign(signer, path, data, entry.name) is not None

    def _highest(self, name: str) -> int:
        """Of what there is of a name, or was, as a signature tells."""
        found = [0]
        for path in self._survey(name):
            file = path.rpartition("/")[2]
            signed = signature_of(file)
            match = _ENTRY.fullmatch(path)
            found += [int(match[2])] if match else [signed[0]] if signed else []
        return max(found)

    def _refuse_unsigned(self, name: str) -> None:
        if self._keys.trusted and self._keys.signer is None:
            raise UntrustedArtifact(
                f"tag '{name}' cannot be written: only signed ones are trusted here, and there is no "
                "key to sign with",
                next_step="Tag where the sign key is, or name the key with --sign-key",
            )

    def release(self, text: str) -> tuple[str, ...]:
        """Lets go of all of "NAME", or of "NAME@2", also of what cannot be read. Its full names.

        Raises PlanError when there is nothing to let go.
        """
        name, generation = parse_name(text)
        shelf = self.shelf(name, unsigned=True)
        live = [e for e in shelf.live if generation in (None, e.generation)]
        if not live:
            raise self._unknown(text, name, generation)
        self.add(Release(name=name, releases=tuple(entry.generation for entry in live)))
        return tuple(entry.full_name for entry in live)

    def sign(self, *, unsigned: bool = False) -> tuple[list[str], list[str]]:
        """Adds a signature to every tag and release that a trusted key signed.

        ``unsigned``: to all that can be read. Returns the full names of the new ones, and those that
        were passed over, with the reason. Raises ValueError without a key to sign with.
        """
        signer = self._keys.signer
        if signer is None:
            raise ValueError("a store signs only if it was opened with a sign_key")
        new: list[str] = []
        refused: list[str] = []
        for entry in self.shelf(unsigned=unsigned).entries:
            path = _path(entry.name, entry.generation)
            data = self._calls.read(path)
            if (entry.content is None or entry.untrusted) and not (unsigned and entry.content):
                why = entry.untrusted or (entry.error.problem if entry.error else "")
                refused.append(f"tag {entry.full_name}: {why}")
            elif data is not None and self._vouching.sign(signer, path, data, entry.name):
                new.append(entry.full_name)
        return new, refused


def _path(name: str, generation: int) -> str:
    return f"{FOLDER}/{name}/{generation}.json"


def _shelved(
    place: tuple[str, int], known: Entry | ChecksumMismatch, untrusted: str = ""
) -> Shelved:
    if isinstance(known, ChecksumMismatch):
        return Shelved(*place, None, known, untrusted)
    return Shelved(*place, known, untrusted=untrusted)


def _parsed(data: bytes, place: tuple[str, int]) -> Entry | ChecksumMismatch:
    try:
        entry = parse_entry(data)
    except ChecksumMismatch as error:
        return error
    if (entry.name, entry.generation) != place:
        problem = "the tag names another place"
        step = "Name an older one (NAME@GENERATION), or tag a working run again"
        return ChecksumMismatch(problem, next_step=step, faults=(problem,))
    return entry


def _problem(entry: Shelved) -> CompileCacheError | None:
    """Why a tag cannot be used; None when it can."""
    if entry.untrusted:
        return refusal(f"tag '{entry.full_name}': {entry.untrusted}")
    if isinstance(entry.error, ChecksumMismatch):
        kind = type(entry.error)
        problem = f"'{entry.full_name}': {entry.error.problem}"
        return kind(problem, next_step=entry.error.next_step, faults=entry.error.faults)
    return None


def released_objects(
    shelf: Shelf, objects: Sequence[str] | Collection[str], old: Callable[[str], bool]
) -> list[str]:
    """Objects below ``FOLDER`` of tags that were released, and are old enough to go."""
    released = shelf.released
    found = []
    for path in objects:
        name, _, file = path.partition("/")
        match, signed = _ENTRY.fullmatch(path), signature_of(file)
        generation = int(match[2]) if match else signed[0] if signed else 0
        if (name, generation) in released and old(path):
            found.append(path)
    return sorted(found)
