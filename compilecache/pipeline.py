"""The main job: look, lock, look again, restore, compile what is missing, publish, prime.

One function walks the targets for all three uses (a cold warm-up, a proof in a fresh process, the
priming of a trainer); only the expected number of compiles differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from pydantic import JsonValue

from compilecache import outcomes, torch_names
from compilecache.cachedir import CacheDir
from compilecache.claims import Claims
from compilecache.engines.choice import Engine, engine_of, offline_engine
from compilecache.engines.harness import Replica, Run
from compilecache.engines.trace import SPARE_ENTRIES
from compilecache.errors import (
    CompileCacheError,
    CompileFailed,
    LockTimeout,
    PlanError,
    UnexpectedCompile,
)
from compilecache.exchange import Exchange, Restored, siblings
from compilecache.extraexchange import ExtraRoots
from compilecache.extras import ExtraRoot
from compilecache.fingerprint import environment, fingerprint
from compilecache.gpuprofile import GpuProfile
from compilecache.progress import LogProgress, Progress
from compilecache.remains import sweep
from compilecache.replicas import refuse_mixed
from compilecache.report import Report, Status, TargetReport
from compilecache.shapes import CompileTarget, EngineName
from compilecache.sharing import Listener, Sharing
from compilecache.store import ArtifactStore
from compilecache.workload import Workload


@dataclass(frozen=True, slots=True)
class Job:
    """What to make warm, and where."""

    workload: Workload
    """Builds, feeds and steps the model."""
    targets: tuple[CompileTarget, ...]
    """All specs on all devices."""
    cache: CacheDir
    """The local root, prepared."""
    store: ArtifactStore | None = None
    """The remote side; None keeps everything local."""
    baked: ArtifactStore | None = None
    """What came with the image; looked into first, never written."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """More keyword arguments of ``torch.compile``; they enter the fingerprint."""
    engine: EngineName = "trace"
    """How targets get compiled and loaded."""
    compile_once_per_gpu_kind: bool = True
    """Whether a program of one GPU is rewritten for the others."""
    instances: int = 1
    """Replicas on one device; each may need entries of its own."""
    strict: bool = False
    """Raise on cache trouble and failed targets instead of reporting them."""
    share: bool = True
    """Whether processes that start cold divide the targets among them, through claims in the store."""
    lock_timeout: float = 3600.0
    """Seconds to wait for another writer, and for whoever has claimed a target; above what the slowest
    takes."""
    extras: tuple[ExtraRoot, ...] = ()
    """Cache roots of other compilers, restored before and published after."""
    spare: int = SPARE_ENTRIES
    """Compiled entries to leave room for beyond the targets."""
    profile: GpuProfile | None = None
    """The GPU to compile for in a process that was prepared to do without it; else None."""


Turns = Callable[[Sequence[CompileTarget]], Iterator[CompileTarget]]
"""All of these, each once, in an order that may depend on what happens meanwhile."""


def warm(job: Job, replicas: Iterable[Replica], progress: Progress | None = None) -> Report:
    """Makes every target warm in the cache root and primes it in this process.

    ``replicas`` are taken one at a time, so a generator that builds them keeps about one in memory.
    Raises PlanError, RecompileBudgetExceeded and LockTimeout; with ``strict`` also CompileFailed,
    UnexpectedCompile and every cache trouble.
    """
    refuse_mixed({target.device for target in job.targets})
    iterator = iter(replicas)
    first = next(iterator)
    mark = fingerprint(
        job.workload,
        torch_names.original(first.module),
        torch.device(first.device),
        options=job.options,
        engine=job.engine,
    )
    keys = {target.key for target in job.targets}
    moving = job.engine != "trace" and job.compile_once_per_gpu_kind and job.profile is None
    elsewhere = siblings(job.targets) if moving else None
    exchange = Exchange(job.cache, job.store, mark, keys, elsewhere)
    return _Warming(job, exchange, progress or LogProgress()).run(chain([first], iterator))


def walk(
    engine: Engine,
    replicas: Iterable[Replica],
    targets: Sequence[CompileTarget],
    starting: Callable[[CompileTarget], Collection[str] | None],
    *,
    instances: int = 1,
    turns: Turns = iter,
) -> Iterator[tuple[CompileTarget, Run | CompileFailed]]:
    """Runs every target on its device, one at a time, and yields what happened.

    ``starting`` hears of each target and gives its files where it is expected to be warm; ``turns``
    says when each of a device comes. A target that fails is yielded as its error; the others go on.
    """
    for replica in replicas:
        engine.compile_in_place(replica, targets, instances)
        for target in turns([t for t in targets if t.device == replica.device]):
            present = starting(target)
            try:
                yield target, engine.run(target, replica.module, present)
            except CompileFailed as error:
                yield target, error


class _Warming:
    """One run of the pipeline."""

    def __init__(self, job: Job, exchange: Exchange, progress: Progress) -> None:
        self._job = job
        self._exchange = exchange
        self._progress = progress
        if job.store is not None:
            job.store.listener = progress.moving
        self._engine = self._engine_of(job)
        self._extras = ExtraRoots(job.extras, job.store, exchange.mark, job.lock_timeout)
        self._restored = Restored()
        self._gave_up: list[str] = []
        self._rows: dict[str, TargetReport] = {}
        self._locked = False

    def _engine_of(self, job: Job) -> Engine:
        if job.profile is not None:
            return offline_engine(
                job.workload, job.cache, job.options, job.profile, strict=job.strict
            )
        return engine_of(
            job.engine,
            job.workload,
            job.cache,
            job.options,
            spare=job.spare,
            elsewhere=self._files_elsewhere,
            strict=job.strict,
        )

    def run(self, replicas: Iterator[Replica]) -> Report:
        began = time.perf_counter()
        self._job.cache.use()
        self._extras.restore(self._surviving, self._trouble)
        self._progress.begin(len(self._job.targets))
        self._exchange.look()
        if self._exchange.missing:
            with self._lock():
                self._fill()
                if self._exchange.missing:
                    self._divide(replicas)
        if not self._rows:
            self._walk(replicas)
        self._publish_left_over()
        self._extras.publish(self._surviving, self._trouble)
        return self._report(time.perf_counter() - began)

    def _fill(self) -> None:
        """Looks again, now that nobody else writes, and restores what the store has."""
        with self._surviving("clearing up"):
            for trouble in self._exchange.look(repair=True):
                self._trouble(f"{trouble}; moved aside")
            for path in sweep(self._job.cache):
                self._trouble(f"'{path}' was never finished by whoever wrote it; moved aside")
        if self._job.baked is not None and self._exchange.missing:
            self._progress.doing("restoring", f"from {self._job.baked.url}")
            with self._surviving("restoring what came with the image"):
                self._arrived(self._exchange.restore_from(self._job.baked))
                self._arrived(self._exchange.restore_settled())
        if self._job.store is None or not self._exchange.missing:
            return
        self._progress.doing("restoring", f"from {self._job.store.url}")
        with self._surviving("restoring"):
            self._arrived(self._exchange.restore())
            if self._exchange.missing:
                self._exchange.adopt(environment(torch.device(self._job.targets[0].device)))

    # -- walking ----------------------------------------------------------------------------

    def _divide(self, replicas: Iterator[Replica]) -> None:
        """Walks in turns with other processes that use the store."""
        job = self._job
        if job.store is None or not job.share:
            self._walk(replicas)
            return
        digest, place = self._exchange.mark.digest, job.cache.lock_name()
        claims = Claims(job.store, digest, place=place, patience=job.lock_timeout)
        hears = Listener(self._arrived, self._waiting, self._alone)
        with closing(Sharing(self._exchange, claims, hears)) as sharing:
            self._walk(replicas, sharing.turns)

    def _arrived(self, more: Restored) -> None:
        self._restored.add(more)
        for fault in more.faults:
            with self._surviving("restoring"):
                raise fault

    def _waiting(self, holders: str) -> None:
        self._progress.doing("waiting", holders)
        self._job.cache.say(f"waiting {holders}")

    def _alone(self, why: OSError | str) -> None:
        if isinstance(why, str):
            assert self._job.store is not None
            self._trouble(f"store '{self._job.store.url}' {why}")
            return
        with self._surviving("sharing the compiling"):
            raise why

    def _walk(self, replicas: Iterator[Replica], turns: Turns = iter) -> None:
        complete = self._exchange.complete

        def starting(target: CompileTarget) -> Collection[str] | None:
            record = complete.get(target.key)
            self._announce("priming" if record else "compiling", target)
            return None if record is None else [entry.path for entry in record.files]

        for target, run in walk(
            self._engine,
            replicas,
            self._job.targets,
            starting,
            instances=self._job.instances,
            turns=turns,
        ):
            row = (
                self._failed(target, run)
                if isinstance(run, CompileFailed)
                else self._ran(target, run)
            )
            self._note(row)

    def _files_elsewhere(self, target: CompileTarget) -> Collection[str] | None:
        """Files of a program that can be rewritten for a target."""
        if not self._job.compile_once_per_gpu_kind:
            return None
        record = self._exchange.stand_in(target)
        return None if record is None else [entry.path for entry in record.files]

    def _note(self, row: TargetReport) -> None:
        """One row a target; of its further instances only what went otherwise is worth a word."""
        known = self._rows.get(row.key)
        if known is None:
            self._progress.done(row)
        if known is None or row.status in ("compiled", "failed"):
            self._rows[row.key] = row

    def _failed(self, target: CompileTarget, error: CompileFailed) -> TargetReport:
        if self._job.strict:
            raise error
        self._trouble(str(error))
        return self._row(target, "failed", error=str(error))

    def _ran(self, target: CompileTarget, run: Run) -> TargetReport:
        record = self._exchange.complete.get(target.key)
        complete = record is not None
        for error in run.troubles:
            self._trouble(str(error))
        as_expected = not run.troubles and (
            run.engine == "program" or not outcomes.is_program(record)
        )
        self._judge(target, run, complete=complete and as_expected)
        restored = target.key in self._restored.keys
        status = outcomes.status(run, complete=complete, restored=restored)
        published = self._keep(target, run, complete=complete)
        return self._row(target, status, run=run, published=published)

    def _judge(self, target: CompileTarget, run: Run, *, complete: bool) -> None:
        """Says what should not have happened; with strict it is an error."""
        problem = outcomes.problem(target, run, complete=complete)
        if not problem and self._job.engine == "program" and run.engine != "program":
            told = outcomes.notes(run, self._exchange.complete.get(target.key))
            self._trouble(f"{target} goes by trace: {'; '.join(told)}")
        if problem and self._job.strict:
            raise UnexpectedCompile(
                problem,
                next_step="See docs/troubleshooting.md, 'complete but compiled', 'bypass', 'eager'",
                target=str(target),
            )
        if problem:
            self._trouble(problem)
        elif run.evidence.outcome == "live" and not complete and self._saves:
            self._trouble(f"{target} was compiled in this process before; nothing of it was saved")

    @property
    def _saves(self) -> bool:
        return self._job.options.get("backend", "inductor") == "inductor"

    def _announce(self, phase: str, target: CompileTarget) -> None:
        self._progress.doing(phase, str(target))
        if self._locked:
            self._job.cache.say(f"{phase} {target}")

    def _row(
        self,
        target: CompileTarget,
        status: Status,
        *,
        run: Run | None = None,
        published: bool = False,
        error: str | None = None,
    ) -> TargetReport:
        record = self._exchange.complete.get(target.key)
        return TargetReport(
            key=target.key,
            target=str(target),
            device=target.device,
            status=status,
            evidence=run.evidence if run else None,
            engine=run.engine if run else "trace",
            notes=outcomes.notes(run, record) if run else (),
            origin=run.origin if run else None,
            bytes=sum(entry.size for entry in record.files) if record else 0,
            published=published,
            error=error,
        )

    # -- publishing -------------------------------------------------------------------------

    def _keep(self, target: CompileTarget, run: Run, *, complete: bool) -> bool:
        """Packs and publishes a finished target at once. True when the store took it."""
        as_it_was = complete and run.evidence.compiled_nothing and not run.troubles
        as_it_was = as_it_was and not run.first_contact
        if not run.files or as_it_was:
            return False
        with self._surviving(f"publishing {target}"), self._lock():
            self._announce("publishing", target)
            made = target, run.files, run.evidence, outcomes.facts(run)
            if run.first_contact and self._exchange.superseded(target.key):
                self._exchange.keep(*made)  # another pod has met a GPU, too, and was faster
                return False
            self._exchange.publish(*made)
            return self._job.store is not None
        return False

    def _publish_left_over(self) -> None:
        """What an earlier run compiled while the store was down goes there now."""
        waiting = self._job.cache.unpublished(self._exchange.mark.digest)
        waiting &= self._exchange.complete.keys()
        if waiting and self._job.store is not None and self._job.store.publishes:
            with self._surviving("publishing what was left over"), self._lock():
                self._exchange.publish_complete(waiting)

    # -- trouble ----------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if self._locked:
            yield
            return

        def waiting(holder: str) -> None:
            self._progress.doing("waiting", f"for {holder}")

        with self._job.cache.lock("warming up", timeout=self._job.lock_timeout, waiting=waiting):
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Cache trouble never ends a training run, unless strict."""
        try:
            yield
        except (PlanError, LockTimeout):
            raise
        except (CompileCacheError, OSError) as error:
            if self._job.strict:
                raise
            self._trouble(f"{what} gave up: {error}")

    def _trouble(self, text: str) -> None:
        self._gave_up.append(text)
        self._progress.trouble(text)

    def _report(self, seconds: float) -> Report:
        return Report(
            fingerprint=self._exchange.mark.digest,
            engine=self._job.engine,
            root=str(self._job.cache.root),
            store=self._job.store.url if self._job.store else None,
            targets=tuple(self._rows[t.key] for t in self._job.targets if t.key in self._rows),
            gave_up=tuple(self._gave_up),
            extra_roots=self._extras.report(),
            restored_bytes=self._restored.bytes,
            restored_files=self._restored.files,
            restore_seconds=self._restored.seconds,
            seconds=seconds,
        )
