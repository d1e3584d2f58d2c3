"""What a cache root, an image and a store have for one fingerprint, and what of it would not fit here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from compilecache.artifact import Record
from compilecache.cachedir import CacheDir
from compilecache.engines.fitting import differences
from compilecache.engines.harness import phase
from compilecache.engines.programfile import Header, program_among, read_header
from compilecache.errors import ChecksumMismatch, PlanError, StoreUnavailable
from compilecache.exchange import siblings
from compilecache.fingerprint import Fingerprint, nearest
from compilecache.shapes import CompileTarget
from compilecache.store import ArtifactStore
from compilecache.weights import Weight, weight
from compilecache.workload import Workload

State = Literal["local", "in image", "in store", "by rewriting", "damaged", "missing"]
"""local: complete in the root. in image: in the cache baked into it. by rewriting: another GPU index has a program of the same spec.
damaged: there is a record in the root, and a file of it has other bytes."""

Changed = dict[str, tuple[str, str]]
"""Name → (then, now)."""

TELLING = (
    "device gpu torch triton cuda python engine workload workload.config source. compile.options "
    "workload. env. driver"
).split()
"""Components of a fingerprint from which others follow, in the order in which people ask for them."""


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What a program in the root says of itself."""

    device: str
    """Where it was compiled, with the index."""
    hardware: str
    """Of that device."""
    torch: str
    """Version and git hash."""
    conditions: int
    """Attributes and globals that must be as they were."""
    unchecked: tuple[str, ...]
    """Expressions that nobody can look up again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What there is of one target."""

    key: str
    """Its name within the fingerprint."""
    target: str
    """Spec and device, in words."""
    state: State
    engine: str | None
    """By which engine its record goes; None without a record."""
    origin: str | None
    """The device whose program would be rewritten; None without one."""
    program: ProgramFacts | None
    """None for a target that goes by trace, or that is not in the root."""
    changed: Changed
    """What its program depends on and is not so here."""
    faults: tuple[str, ...]
    """What is damaged."""

    @property
    def warm(self) -> bool:
        """It is there, whole, and fits."""
        return self.state not in ("damaged", "missing") and not self.faults and not self.changed


@dataclass(frozen=True, slots=True)
class Published:
    """The fingerprint in the store that comes nearest to this machine's."""

    digest: str
    targets: int
    """How many are published for it."""
    changed: Changed
    """Component → (published, here), the most telling first; empty when it is this machine's own."""
    weights: dict[str, Weight]
    """What a difference in each of them means for torch's own keys."""

    def differing(self, *, matters: bool) -> Changed:
        """Those that are known to matter, or those that are only caution."""
        return {
            name: pair
            for name, pair in self.changed.items()
            if self.weights[name].matters == matters
        }


class Search:
    """What root and store have for one fingerprint."""

    def __init__(
        self,
        cache: CacheDir,
        store: ArtifactStore | None,
        mark: Fingerprint,
        *,
        baked: ArtifactStore | None = None,
        rewriting: bool,
    ) -> None:
        self._cache = cache
        self._store = store
        self._baked = baked
        self._mark = mark
        self._rewriting = rewriting
        self._records = cache.records(mark.digest)
        self._faults: dict[str, tuple[str, ...]] = {}
        """Of records in the root that were looked at."""
        self._published: dict[str, Record] = {}
        self._in_image: frozenset[str] = frozenset()
        self.trouble: str | None = None
        self.untrusted: tuple[str, ...] = ()

    def look(self, targets: Iterable[CompileTarget]) -> None:
        """Compares files with their digests; asks the store for what the root lacks."""
        lacking = [target for target in targets if not self._is_complete(target.key)]
        if self._baked is not None:
            self._ask(self._baked, lacking)
            self._in_image = frozenset(self._published)
        self._ask(self._store, [t for t in lacking if t.key not in self._in_image])

    def _ask(self, store: ArtifactStore | None, lacking: Iterable[CompileTarget]) -> None:
        wanted = {key for target in lacking for key in (target.key, *self._elsewhere(target))}
        if store is None or not wanted:
            return
        try:
            view = store.latest(self._mark.digest, wanted & store.keys(self._mark.digest))
        except StoreUnavailable as error:
            self.trouble = error.problem
            return
        self._published = {**view.records, **self._published}
        self.untrusted += view.untrusted

    def _is_complete(self, key: str) -> bool:
        record = self._records.get(key)
        if record is None:
            return False
        if key not in self._faults:
            self._faults[key] = self._cache.damaged(record.files)
        return not self._faults[key]

    def _elsewhere(self, target: CompileTarget) -> list[str]:
        """Keys of the same spec on other indices."""
        return list(siblings([target])) if self._rewriting else []

    # -- one target -----------------------------------------------------------------------------

    def has_program(self, target: CompileTarget) -> bool:
        """Whether the root has a program for it, to compare with a model."""
        _, record = self._find(target)
        return record is not None and self._program_file(record) is not None

    def finding(self, target: CompileTarget, workload: Workload, module: nn.Module) -> Finding:
        """What there is; ``module`` lies on the target's device when the root has a program for it."""
        state, record = self._find(target)
        path = self._program_file(record) if record else None
        faults, header = self._faults.get(target.key, ()), None
        if record is not None and path is not None:
            try:
                header = read_header(self._cache.root / path)
            except ChecksumMismatch as error:
                faults = error.faults
        source = record.target if record and state == "by rewriting" else None
        return Finding(
            key=target.key,
            target=str(target),
            state="damaged" if faults else state,
            engine=_engine(record),
            origin=source.device if source else None,
            program=_facts(header) if header else None,
            changed=_changed(header, target, workload, module) if header else {},
            faults=faults,
        )

    def _find(self, target: CompileTarget) -> tuple[State, Record | None]:
        """Where a start would take it from: in the order in which that looks."""
        key = target.key
        if key in self._records:
            return "local" if self._is_complete(key) else "damaged", self._records[key]
        if key in self._published:
            return "in image" if key in self._in_image else "in store", self._published[key]
        others = self._elsewhere(target)
        here = [self._records[other] for other in others if self._is_complete(other)]
        stored = [self._published[other] for other in others if other in self._published]
        programs = [record for record in (*here, *stored) if _engine(record) == "program"]
        return ("by rewriting", programs[0]) if programs else ("missing", None)

    def _program_file(self, record: Record) -> str | None:
        """The program of a record whose files are whole and in the root."""
        if self._records.get(record.key) is not record or not self._is_complete(record.key):
            return None
        return program_among([entry.path for entry in record.files])

    # -- other fingerprints -----------------------------------------------------------------------

    def fingerprints(self) -> list[str]:
        """Digests of the store; empty when it does not answer."""
        if self._store is None or self.trouble:
            return []
        try:
            return self._store.fingerprints()
        except StoreUnavailable as error:
            self.trouble = error.problem
            return []

    def nearest(self) -> Published | None:
        """Of the same workload where there is one; this very fingerprint when the store has it."""
        if self._store is None:
            return None
        known = {}
        try:
            for digest in self.fingerprints():
                read = _parsed(self._store.get_fingerprint(digest))
                if read is not None and "workload" in read.components:
                    known[digest] = read
            workload = self._mark.components["workload"]
            same = [read for read in known.values() if read.components["workload"] == workload]
            closest = nearest(self._mark, same or known.values())
            if closest is None:
                return None
            digest = next(digest for digest, read in known.items() if read is closest)
            count = len(self._store.keys(digest))
        except StoreUnavailable as error:
            self.trouble = error.problem
            return None
        changed = self._mark.diff(closest)
        ranked = sorted(changed, key=_rank)
        device = self._mark.components.get("device", "cpu")
        return Published(
            digest,
            count,
            {name: changed[name] for name in ranked},
            {name: weight(name, device) for name in ranked},
        )


def _engine(record: Record | None) -> str | None:
    if record is None:
        return None
    return "program" if program_among([entry.path for entry in record.files]) else "trace"


def _facts(header: Header) -> ProgramFacts:
    return ProgramFacts(
        device=header.device,
        hardware=header.hardware,
        torch=header.torch,
        conditions=len(header.conditions),
        unchecked=header.unchecked,
    )


def _changed(
    header: Header, target: CompileTarget, workload: Workload, module: nn.Module
) -> Changed:
    """What does not fit; without the state of the thread, which phase, step and trainer set."""
    function = workload.functions(module)[target.spec.function]
    with phase(target.spec, module):
        found = differences(header, target, function)
    return {name: pair for name, pair in found.items() if not name.startswith("state.")}


def _parsed(text: str | None) -> Fingerprint | None:
    try:
        return Fingerprint.parse(text or "")
    except PlanError:
        return None


def _rank(name: str) -> tuple[int, str]:
    """A prefix ends with a dot."""
    for place, known in enumerate(TELLING):
        if name == known or (known.endswith(".") and name.startswith(known)):
            return place, name
    return len(TELLING), name
