"""Why a process on this machine would start warm, or would not. Looks only: root and store stay as they are.

What the fingerprint names is compared with what the store holds under other fingerprints; what it
does not name, but programs depend on, with the model that the workload builds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from compilecache.cachedir import CacheDir
from compilecache.fingerprint import environment, fingerprint
from compilecache.replicas import build_replicas
from compilecache.search import Finding, Published, Search, State
from compilecache.shapes import EngineName, ShapePlan
from compilecache.store import ArtifactStore
from compilecache.workload import workload_of_plan

FROM_ELSEWHERE: tuple[State, ...] = ("in image", "in store", "by rewriting")
"""States of what a start still has to bring."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a start with this plan would find."""

    fingerprint: str
    engine: EngineName
    """That the plan asks for."""
    root: str
    store: str | None
    """Its address; None without a store."""
    targets: tuple[Finding, ...]
    nearest: Published | None
    """None when nothing is missing, or nothing is published."""
    adopted: bool
    """Whether something is missing and the store holds a whole directory of this environment."""
    trouble: str | None
    """Why the store could not be asked."""
    untrusted: tuple[str, ...] = ()
    """Records of these targets that no trusted key signed, and why."""

    @property
    def warm(self) -> bool:
        """A start would compile nothing."""
        return all(found.warm for found in self.targets)

    @property
    def damaged(self) -> bool:
        """Something in the root is not what it was."""
        return any(found.faults for found in self.targets)

    def count(self, state: State) -> int:
        """How many targets are in that state."""
        return sum(found.state == state for found in self.targets)

    @property
    def next_step(self) -> str:
        """What to do now, in one sentence."""
        if self.damaged:
            return (
                "Run 'compilecache warm' with the same plan: it moves damaged files aside and mends"
            )
        if any(found.changed for found in self.targets):
            return (
                "Run 'compilecache warm' with the same plan: it compiles anew what does not fit. "
                "Let the workload's config() hold what differs, and each gets an artifact of its own"
            )
        if self.trouble and not self.warm:
            return "Make the store answer and ask again, or compile with 'compilecache warm'"
        if not self.warm and self.untrusted:
            return (
                "Run 'compilecache warm' where the sign key is, or vouch for what the store holds "
                "with 'compilecache sign'"
            )
        if not self.warm and self.adopted:
            return (
                "Run 'compilecache restore', then 'compilecache verify': the store has an adopted "
                "directory of this environment, which may serve what is missing"
            )
        if not self.warm:
            return "Run 'compilecache warm' with the same plan: it compiles what is missing"
        if any(map(self.count, FROM_ELSEWHERE)):
            return "Run 'compilecache restore' with the same plan; a start does the same by itself"
        return "Nothing to do; 'compilecache verify' proves it in a fresh process"

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {"warm": self.warm, **asdict(self), "next_step": self.next_step}


def explain_plan(
    plan: ShapePlan,
    devices: Sequence[str],
    cache: CacheDir,
    store: ArtifactStore | None,
    baked: ArtifactStore | None = None,
) -> Explanation:
    """Looks for every target of the plan; models are built, one at a time, and nothing is compiled.

    Raises PlanError.
    """
    workload = workload_of_plan(plan)
    for spec in plan.specs:
        workload.check(spec)
    replica = next(build_replicas(workload, devices[:1]))
    kind = torch.device(replica.device)
    options = plan.compile_options
    mark = fingerprint(workload, replica.module, kind, options=options, engine=plan.engine)
    targets = plan.targets(devices)
    search = Search(cache, store, mark, baked=baked, rewriting=plan.engine != "trace")
    search.look(targets)
    found = []
    for device in devices:
        mine = [target for target in targets if target.device == device]
        if device != replica.device and any(search.has_program(target) for target in mine):
            replica = next(build_replicas(workload, [device]))
        found += [search.finding(target, workload, replica.module) for target in mine]
    lacking = any(finding.state == "missing" for finding in found)
    return Explanation(
        fingerprint=mark.digest,
        engine=plan.engine,
        root=str(cache.root),
        store=store.url if store else None,
        targets=tuple(found),
        nearest=search.nearest() if lacking else None,
        adopted=lacking and environment(kind).digest in search.fingerprints(),
        trouble=search.trouble,
        untrusted=search.untrusted,
    )
