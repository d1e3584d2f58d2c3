"""All checks in order; one that cannot be done is a finding and stops no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.doctor import bytecode, lock, packages, plan, probes, root, settings, store
from compilecache.doctor.finding import Diagnosis, Finding, Group, worst
from compilecache.errors import CompileCacheError
from compilecache.fingerprint import Fingerprint
from compilecache.packages import interfering
from compilecache.replicas import fingerprint_for
from compilecache.shapes import ShapePlan
from compilecache.storage import open_storage
from compilecache.store import ArtifactStore

Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at."""

    cache: CacheDir
    store: str | None
    """Its address; None for the default one, "none" for no store."""
    devices: Sequence[str]
    plan: ShapePlan | None = None
    """Whose fingerprint is compared with what is published."""
    plan_file: str = "PLAN"
    """As it is named in commands."""
    compiling: bool = False
    """Whether to compile, to see which graphs torch never caches."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment as it was at first: torch itself adds its folder to it."""
    sources: Path = Path()
    """Folder whose Python files are read for settings that hide damage."""


def examine(patient: Patient) -> Diagnosis:
    """Looks at everything. Raises StoreUnavailable only for an address that is none."""
    storage = (
        None
        if patient.store == "none"
        else open_storage(patient.store, patience=store.BUDGET_SECONDS, options=None)
    )
    found: list[tuple[Group, Finding]] = []

    def add(group: Group, check: Check) -> list[Finding]:
        told = list(_guarded(check))
        found.extend((group, finding) for finding in told)
        return told

    cache = patient.cache
    # First of all: it imports the workload, which may change settings that are looked at later.
    mark = fingerprint_for(patient.plan, patient.devices[0]) if patient.plan else None
    if worst(add("root", lambda: root.check_root(cache))) != "error" or _is_writable(cache):
        add("lock", lambda: lock.check_lock(cache))
    answers = storage is not None
    if storage is not None:
        answers = worst(add("store", lambda: store.check_store(storage))) != "error"
    add("settings", lambda: settings.check_variables(cache, patient.variables))
    add("settings", settings.check_settings)
    add("settings", lambda: bytecode.check_bytecode(patient.variables))
    add("settings", lambda: settings.check_sources(patient.sources))
    _look_at_torch(patient, add)
    near = plan.Nearest(None, None)
    if answers and mark is not None:
        near = _nearest(patient, mark, add)
    add("packages", lambda: packages.check_packages(interfering(), near.packages))
    add("packages", packages.check_doubles)
    if patient.compiling and patient.plan is not None:
        shapes = patient.plan
        add("plan", lambda: plan.check_bypasses(shapes, patient.devices[0]))
    return Diagnosis(str(cache.root), storage.url if storage else None, tuple(found))


Add = Callable[[Group, Check], list[Finding]]


def _look_at_torch(patient: Patient, add: Add) -> None:
    add("torch", probes.check_names)
    add("torch", probes.check_threads)
    add("torch", lambda: probes.check_compilers(patient.devices))
    add("torch", lambda: probes.check_threads_of_cpu(patient.devices))


def _nearest(patient: Patient, mark: Fingerprint, add: Add) -> plan.Nearest:
    near = plan.Nearest(None, None)

    def check() -> Iterator[Finding]:
        nonlocal near
        opened = ArtifactStore.open(patient.store, budget_seconds=store.BUDGET_SECONDS)
        near = plan.nearest_of(mark, patient.cache, opened)
        yield from plan.check_fingerprint(near.published, patient.plan_file)

    add("plan", check)
    return near


def _is_writable(cache: CacheDir) -> bool:
    try:
        cache.create()
    except CompileCacheError:
        return False
    return True


def _guarded(check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # whatever it raises: a doctor that dies helps nobody
        step = error.next_step if isinstance(error, CompileCacheError) else ""
        said = error.problem if isinstance(error, CompileCacheError) else str(error)
        yield Finding(
            f"a check could not be done: {type(error).__name__}: {said}",
            "What it looks at may be fine or not.",
            step or "export COMPILECACHE_DEBUG=1  # and please report it",
            "warning",
        )
