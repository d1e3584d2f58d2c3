"""The remote side: fingerprints, records and packs below one root; only gc takes anything away.

Layout below the root::

    v1/<fingerprint>/fingerprint.json
                    /packs/<sha256>.tar.zst
                    /artifacts/<key>/<generation>.json            written after its pack
                    /artifacts/<key>/<generation>.<key id>.sig    written after its record
                    /claims/<key>/<generation>.json               see ``claims.py``
                    /sweeps/<token>, /renewed/<hour>              see ``sweeps.py``
    v1/tags/<name>/<generation>.json                              see ``tagstore.py``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

from compilecache.artifact import PackInfo, Record
from compilecache.budget import Budget
from compilecache.calls import Calls
from compilecache.errors import ChecksumMismatch, StoreUnavailable, UntrustedArtifact
from compilecache.pack import broken_packs, sha256_of
from compilecache.reader import AbsentError, Reader
from compilecache.records import (
    DIGEST,
    VERSION,
    Found,
    Records,
    Signed,
    StoreEntry,
    StoreView,
    folder_of,
)
from compilecache.signing import NOBODY, Keys, open_keys
from compilecache.storage import Option, Storage, open_storage
from compilecache.sweeps import wait_for_sweeps
from compilecache.tagstore import Tags
from compilecache.transfer import Listener, Transfer

BUDGET_SECONDS = 120.0
READ_BACK_BYTES = 64 << 20
"""Packs up to here are read back whole after an upload; of larger ones the size is compared."""
PUBLISHED_AGAIN = 3
"""A publisher whose objects were collected while it published tries as often."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

S = TypeVar("S")
T = TypeVar("T")


class ArtifactStore:
    """One store. Safe to use from several threads and after a fork.

    Every method raises StoreUnavailable when the store does not answer, refuses, or has used up its
    budget; what is not there is None or empty.
    """

    def __init__(self, storage: Storage, budget: Budget, keys: Keys = NOBODY) -> None:
        self._calls = Calls(storage, budget)
        self._keys = keys
        self._records = Records(self._calls, keys)
        self.tags = Tags(self._calls, keys)
        """Names of states that are known to work."""
        self.listener: Listener | None = None
        """Hears how many bytes of files are restored, and of packs published."""

    @classmethod
    def open(
        cls,
        url: str | Path | None = None,
        *,
        budget_seconds: float = BUDGET_SECONDS,
        storage_options: Mapping[str, Option] | None = None,
        sign_key: str | Path | None = None,
        trust_keys: Iterable[str | Path] | None = None,
    ) -> Self:
        """The store at a directory, ``file://``, ``memory://`` or ``s3://`` address; touches nothing yet.

        ``None``: ``COMPILECACHE_STORE``, else ``~/.cache/compilecache/store``. ``budget_seconds``:
        what its failures may cost in all. ``storage_options``: for S3, named as s3fs names them
        (``endpoint_url``, ``key``, ``secret``, ``config_kwargs``, …: docs/transfers.md); the
        environment's ``AWS_ENDPOINT_URL`` and credentials count as usual.

        ``trust_keys``: files of public keys; with any, a record that none of them signed is as good
        as absent, and nothing unsigned is published. ``sign_key``: file of the private key that signs
        what is published; its public half is trusted. None: ``COMPILECACHE_TRUST_KEYS`` and
        ``COMPILECACHE_SIGN_KEY``. Raises PlanError and UntrustedArtifact for a key file.
        """
        keys = open_keys(sign_key, trust_keys)
        storage = open_storage(url, patience=budget_seconds, options=storage_options)
        return cls(storage, Budget(storage.url, budget_seconds), keys)

    @property
    def url(self) -> str:
        """The address, normalised, without secrets."""
        return self._calls.storage.url

    @property
    def signs(self) -> bool:
        """Whether it was opened with a key to sign with."""
        return self._keys.signer is not None

    @property
    def trusts(self) -> bool:
        """Whether only records count that a trusted key signed."""
        return bool(self._keys.trusted)

    @property
    def publishes(self) -> bool:
        """False when only signed records count and there is no key to sign with."""
        return self.signs or not self.trusts

    # -- fingerprints -------------------------------------------------------------------------

    def put_fingerprint(self, digest: str, text: str) -> None:
        """Publishes what a digest stands for, for ``explain``; the first text stays."""
        name = f"{folder_of(digest)}/fingerprint.json"
        if self._calls.size("fingerprint lookup", name) is None:
            self._calls.create("fingerprint", name, text.encode())

    def get_fingerprint(self, digest: str) -> str | None:
        """The text of a fingerprint, unchecked."""
        data = self._calls.read(f"{folder_of(digest)}/fingerprint.json")
        return None if data is None else data.decode(errors="replace")

    def fingerprints(self) -> list[str]:
        """Digests of every fingerprint that something was published for."""
        storage = self._calls.storage
        found = self._calls.call("listing fingerprints", lambda: storage.folders(VERSION))
        return sorted(name for name in found if DIGEST.fullmatch(name))

    # -- small objects of a fingerprint -------------------------------------------------------

    def create(self, fingerprint: str, name: str, data: bytes) -> bool:
        """Writes a small object unless one of that name is there: then False.

        Also False when it is ours and only the answer was lost: read it back.
        """
        path = f"{folder_of(fingerprint)}/{name}"
        storage = self._calls.storage
        return self._calls.call(f"writing '{name}'", lambda: storage.create(path, data))

    def read_small(self, fingerprint: str, name: str) -> bytes | None:
        """A small object, unchecked; None when there is none."""
        return self._calls.read(f"{folder_of(fingerprint)}/{name}")

    # -- publishing ---------------------------------------------------------------------------

    def publish(self, record: Record, pack: Path | None) -> Record:
        """Adds the pack, then the record, at its generation or the next free one above.

        Returns the record that is in the store now: this one, or somebody else's of the same content.
        A pack that is there is checked and not sent again; a damaged one is replaced by the good one.
        Raises ChecksumMismatch when ``pack`` is not what the record says, or when the store does not
        have the packs of others that the record leans on (any more): pack all its files then.
        UntrustedArtifact when only signed records count and there is no key to sign with.
        """
        if not self.publishes:
            raise UntrustedArtifact(
                f"{record.key} cannot be published: only signed records are trusted here, and there is "
                "no key to sign with",
                next_step="Let the job that has the key warm it, or name the key with --sign-key",
            )
        if record.pack is not None and pack is None:
            raise ValueError("a record with a pack needs the file of that pack")
        for _ in range(PUBLISHED_AGAIN):
            if record.pack is not None and pack is not None:
                self._send(record.fingerprint, record.pack, pack)
            self._refuse_missing_packs(record)
            stored = self._records.add(record)
            # A sweep that began before the record was there may not know of it; one that begins
            # now does. So: wait for those, then see what they left.
            self.settle(record.fingerprint)
            if self._records.holds(stored) and not self._missing_packs(stored):
                return stored
        self._refuse_missing_packs(record)
        raise StoreUnavailable(
            f"store '{self.url}' loses the record of {record.key} again and again",
            next_step="End the 'compilecache gc' that runs there, then publish again",
        )

    def _refuse_missing_packs(self, record: Record) -> None:
        own = {record.pack.sha256} if record.pack else set()
        missing = self._missing_packs(record) - own
        if missing:
            raise broken_packs(f"pack {sha256[:12]}: missing" for sha256 in sorted(missing))

    def _missing_packs(self, record: Record) -> set[str]:
        return self.missing_packs(record.fingerprint, {entry.pack for entry in record.files})

    def _packs(self, fingerprint: str) -> Collection[str]:
        folder = f"{folder_of(fingerprint)}/packs"
        return self.call("listing packs", lambda: self.storage.walk(folder))

    def settle(self, fingerprint: str) -> None:
        """Returns when no collector can be at work that began before this call."""
        wait_for_sweeps(self.storage, self.call, folder_of(fingerprint))

    def _send(self, fingerprint: str, info: PackInfo, pack: Path) -> None:
        if not _is_pack(pack, info):
            raise ChecksumMismatch(
                f"'{pack}' is not the pack {info.sha256[:12]} of its record",
                next_step="Pack the target again",
                faults=(f"pack {info.sha256}",),
            )
        name = _pack_name(fingerprint, info.sha256)
        what = f"pack {info.sha256[:12]}"
        size = self._calls.size(what, name)
        if size is not None and self._holds(name, info, whole=True):
            return
        storage, there = self._calls.storage, size is not None

        def send() -> None:
            sent = Transfer("publishing", info.size, self.listener).add
            storage.upload(name, pack, replace=there, sent=sent)

        for _ in range(2):
            self._calls.call(what, send)
            held = self._holds(name, info, whole=info.size <= READ_BACK_BYTES)
            if held:
                return
            if held is False or not there:
                break  # else a sweep has taken it for the one that was there before
        raise StoreUnavailable(
            f"store '{self.url}' does not give back the bytes of {what} that were sent",
            next_step="Check the store for a proxy or a full disk, or name another one",
        )

    def _holds(self, name: str, info: PackInfo, *, whole: bool) -> bool | None:
        """Whether an object has the size, or the very bytes, of a pack; None when there is none."""
        try:
            with self._reader(name) as reader:
                right_size = reader.size == info.size
                return right_size and (not whole or sha256_of(reader) == info.sha256)
        except AbsentError:
            return None

    def sign(self, fingerprint: str, *, unsigned: bool = False) -> Signed:
        """Adds a signature to the record in force of each target; those that are there stay.

        Only to records that a trusted key signed, unless ``unsigned``: then whatever the store holds
        is vouched for. Raises ValueError for a store that was opened without ``sign_key``.
        """
        if self._keys.signer is None:
            raise ValueError("a store signs only if it was opened with a sign_key")
        return self._records.sign(self._keys.signer, fingerprint, unsigned=unsigned)

    # -- reading ------------------------------------------------------------------------------

    def latest(self, fingerprint: str, keys: Collection[str] | None = None) -> StoreView:
        """The record in force of each of these targets; of all, when ``keys`` is None.

        With ``keys`` the cost depends on their number only, not on what else is published.
        """
        return self._records.latest(fingerprint, keys)

    def exact(self, fingerprint: str, key: str, generation: int) -> Found | None:
        """One generation of a target, in force or not, if it can be used and is trusted.

        Raises ChecksumMismatch, UnsafePath, UntrustedArtifact.
        """
        return self._records.exact(fingerprint, key, generation)

    def pinned(self, fingerprint: str, key: str, generation: int, sha256: str) -> Record | None:
        """The same by the digest of its bytes, which whoever names it vouches for."""
        return self._records.pinned(fingerprint, key, generation, sha256)

    def has_record(self, record: Record) -> bool:
        """Whether a record is there, in force or not."""
        return self._records.there(record)

    def each(self, items: Sequence[S], act: Callable[[S], T]) -> list[T]:
        """``act`` on every item, in order, several at a time where that helps."""
        return self._calls.each(items, act)

    def missing_packs(self, fingerprint: str, packs: Collection[str]) -> set[str]:
        """Those of these packs, by sha256, that are not there."""
        there = self._packs(fingerprint)
        return {sha256 for sha256 in packs if f"{sha256}.tar.zst" not in there}

    def keys(self, fingerprint: str) -> frozenset[str]:
        """Keys of everything published for a fingerprint, signed or not, from one listing."""
        return self._records.published(fingerprint)

    def highest_generation(self, fingerprint: str, key: str) -> int:
        """Of a target's records, readable or not; 0 when there are none."""
        return self._records.highest(fingerprint, key)

    def entries(self, fingerprint: str) -> tuple[StoreEntry, ...]:
        """What ``ls`` shows: a line for each published target."""
        return self.latest(fingerprint).entries

    @contextmanager
    def open_pack(self, fingerprint: str, sha256: str) -> Iterator[Reader]:
        """A pack to read once from the front; a read that fails is tried again at its place.

        Raises ChecksumMismatch when the store does not have it.
        """
        try:
            with self._reader(_pack_name(fingerprint, sha256)) as reader:
                yield reader
        except AbsentError:
            raise broken_packs([f"pack {sha256[:12]}: missing"]) from None

    # -- calls --------------------------------------------------------------------------------

    @property
    def streams(self) -> tuple[int, int]:
        """How many packs at a time to begin with, and how many can help."""
        return self._calls.storage.streams

    @property
    def workers(self) -> int:
        """How many calls at a time help."""
        return self._calls.storage.workers

    @property
    def storage(self) -> Storage:
        """What it lies on; for gc and fsck."""
        return self._calls.storage

    def call(self, what: str, act: Callable[[], T]) -> T:
        """The result of one call to the storage, with the store's patience; for gc and fsck."""
        return self._calls.call(what, act)

    def _reader(self, name: str) -> Reader:
        return Reader(self._calls.storage, name, self._calls.budget)


def _pack_name(fingerprint: str, sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"{sha256[:80]!r} is no sha256")
    return f"{folder_of(fingerprint)}/packs/{sha256}.tar.zst"


def _is_pack(path: Path, info: PackInfo) -> bool:
    with path.open("rb", buffering=0) as file:
        return sha256_of(file) == info.sha256 and path.stat().st_size == info.size
