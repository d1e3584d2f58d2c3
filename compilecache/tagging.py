"""Making a tag: what a run used, as the store holds it, and what the process ran in."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compilecache.artifact import Record
from compilecache.cachedir import CacheDir
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    PlanError,
    StoreUnavailable,
    UntrustedArtifact,
)
from compilecache.fingerprint import Fingerprint
from compilecache.pinning import lost
from compilecache.records import Found
from compilecache.shapes import CompileTarget, ShapePlan
from compilecache.store import ArtifactStore
from compilecache.surroundings import surroundings
from compilecache.tags import NOTE_LETTERS, Tag, TaggedRecord, parse_name
from compilecache.workload import Workload

logger = logging.getLogger("compilecache")

NAMED = 3
"""Targets that one message names."""


@dataclass(frozen=True, slots=True)
class Words:
    """What whoever makes a tag says about the run."""

    tokens_per_second: float | None = None
    note: str = ""


def make_tag(
    name: str,
    fingerprint: str,
    store: ArtifactStore,
    cache: CacheDir | None,
    *,
    keys: Collection[str] | None = None,
    plan: ShapePlan | None = None,
    devices: Sequence[str] = (),
    words: Words = Words(),
) -> Tag:
    """Names what the store holds for these targets, in the generations that the root uses.

    ``keys`` None: all that the root has complete for the fingerprint, without a root all that is
    published for it. Returns the tag as it lies in the store. Raises PlanError for a bad name or
    when something is not published, ChecksumMismatch and UntrustedArtifact for what cannot be used,
    StoreUnavailable.
    """
    check_new(name, words)
    mark = published_mark(store, fingerprint)
    found = _Records(store, fingerprint, cache).find(keys)
    tag = Tag(
        name=name,
        note=words.note,
        tokens_per_second=words.tokens_per_second,
        fingerprint=fingerprint,
        components=dict(mark.components),
        records=tuple(_tagged(one) for _, one in sorted(found.items())),
        devices=tuple(devices) or _devices(found),
        plan=plan,
        surroundings=surroundings(mark),
    )
    return _kept(store, store.tags.add(tag), [one.record for one in found.values()])


@dataclass(frozen=True, slots=True)
class Used:
    """What a process that is warm uses."""

    fingerprint: str
    plan: ShapePlan
    targets: Sequence[CompileTarget]
    cache: CacheDir


def tag_run(
    name: str, used: Used, store: ArtifactStore, words: Words, *, strict: bool
) -> str | None:
    """Tags what a running process uses; trouble with the store is logged, or raised when strict.

    Targets that have no artifact, since they failed or are never cached, are left out. Returns the
    full name. Raises PlanError for a bad name, rate or note.
    """
    check_new(name, words)
    try:
        has = used.cache.records(used.fingerprint)
        keys = [target.key for target in used.targets if target.key in has]
        devices = list(dict.fromkeys(target.device for target in used.targets))
        tag = make_tag(
            name,
            used.fingerprint,
            store,
            used.cache,
            keys=keys,
            plan=used.plan,
            devices=devices,
            words=words,
        )
    except (CompileCacheError, OSError) as error:
        if strict:
            raise
        logger.warning("this run was not tagged as '%s': %s", name, error)
        return None
    return tag.full_name


def named_plan(plan: ShapePlan, workload: Workload) -> ShapePlan:
    """The plan, with the name under which its workload can be made anew, where it has one."""
    origin = workload.origin() if plan.workload is None else None
    if origin is None:
        return plan
    return plan.model_copy(update={"workload": origin[0], "settings": dict(origin[1])})


def check_new(name: str, words: Words) -> None:
    """Raises PlanError for a name, a rate or a note that cannot be kept."""
    if parse_name(name)[1] is not None:
        raise PlanError(
            f"'{name}' names a generation, and the store counts those",
            next_step=f"Tag it as '{name.partition('@')[0]}'",
            field="NAME",
        )
    rate = words.tokens_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise PlanError(
            f"{rate} tokens per second is no rate",
            next_step="Give what was measured, a number above 0",
            field="tokens_per_second",
        )
    if len(words.note) > NOTE_LETTERS:
        raise PlanError(
            f"the note has {len(words.note)} letters, above the limit of {NOTE_LETTERS}",
            next_step="Say it in fewer",
            field="note",
        )


def published_mark(store: ArtifactStore, fingerprint: str) -> Fingerprint:
    """What a digest stands for, from the store. Raises ChecksumMismatch when it does not say."""
    text = store.get_fingerprint(fingerprint)
    try:
        mark = Fingerprint.parse(text or "")
    except PlanError:
        mark = Fingerprint({})
    if mark.digest != fingerprint:
        what = "no" if text is None else "another"
        raise ChecksumMismatch(
            f"store '{store.url}' has {what} fingerprint.json for {fingerprint[:12]}",
            next_step="Run 'compilecache fsck PLAN --repair' with the plan of the run",
            faults=(f"{fingerprint}/fingerprint.json",),
        )
    return mark


def _tagged(found: Found) -> TaggedRecord:
    record = found.record
    return TaggedRecord(
        key=record.key,
        generation=record.generation,
        sha256=found.sha256,
        files=len(record.files),
        bytes=sum(entry.size for entry in record.files),
    )


def _devices(found: Mapping[str, Found]) -> tuple[str, ...]:
    targets = (one.record.target for one in found.values())
    return tuple(sorted({target.device for target in targets if target is not None}))


def _kept(store: ArtifactStore, tag: Tag, records: Collection[Record]) -> Tag:
    """The tag, once no collector can take what it names any more.

    One that began before the tag was there may not know of it: so wait, and see what it left.
    """
    store.settle(tag.fingerprint)
    faults = lost(store, tag.fingerprint, records)
    if not faults:
        # Where a store ignores "only if absent", another tag of the name may lie there by now.
        return tag if _lies_there(store, tag) else store.tags.add(tag)
    store.tags.release(tag.full_name)
    raise StoreUnavailable(
        f"what '{tag.name}' names was collected meanwhile: {faults[0]}",
        next_step="Run 'compilecache publish' with the plan, then tag again",
    )


def _lies_there(store: ArtifactStore, tag: Tag) -> bool:
    try:
        return store.tags.find(tag.full_name).tag == tag
    except (ChecksumMismatch, PlanError, UntrustedArtifact):
        return False


class _Records:
    """Looks for the published records that a root uses."""

    def __init__(self, store: ArtifactStore, fingerprint: str, cache: CacheDir | None) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._local = cache.records(fingerprint) if cache is not None else {}
        self._unpublished = cache.unpublished(fingerprint) if cache is not None else set()
        self._published = store.keys(fingerprint)

    def find(self, keys: Collection[str] | None) -> dict[str, Found]:
        """By key. Raises PlanError naming what is not published."""
        wanted = set(keys) if keys is not None else set(self._local) or set(self._published)
        wanted |= {key for key in self._published if key.startswith("extra-")}
        looked = self._store.each(sorted(wanted), self._one)
        problems = [one for one in looked if isinstance(one, str)]
        found = [one for one in looked if isinstance(one, Found)]
        if problems or not found:
            raise self._lacking(problems, len(wanted))
        return {one.record.key: one for one in found}

    def _one(self, key: str) -> Found | str:
        """The generation that the root has; without one the generation in force. Or why not."""
        try:
            record = self._local.get(key)
            if record is None:
                record = self._store.latest(self._fingerprint, [key]).records.get(key)
            if record is not None and key not in self._unpublished:
                found = self._store.exact(self._fingerprint, key, record.generation)
                return found if found is not None else f"{key} is not published any more"
        except StoreUnavailable:
            raise
        except CompileCacheError as error:
            return f"{key}: {error.problem}"
        return f"{key} is not published"

    def _lacking(self, problems: list[str], wanted: int) -> PlanError:
        more = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        what = f"{'; '.join(problems[:NAMED])}{more}" if problems else "nothing is published for it"
        return PlanError(
            f"{len(problems) or 'none'} of {wanted} targets cannot be tagged: {what}",
            next_step="Run 'compilecache warm' or 'compilecache publish' with the plan of the run, "
            "then tag it",
            field="NAME",
        )
