"""``ensure_warm``: one call in a training program, before its first step."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import ranks, torch_names
from compilecache.baked import open_baked
from compilecache.cachedir import CacheDir
from compilecache.engines.harness import Harness, Replica
from compilecache.engines.trace import SPARE_ENTRIES
from compilecache.errors import CompileCacheError, LockTimeout, PlanError
from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.extras import extra_roots as found_extras
from compilecache.guard.calls import PlannedFunction
from compilecache.guard.found import find_in_threads
from compilecache.guard.seal import OnMiss, Planned
from compilecache.guard.state import ThreadState
from compilecache.guard.warm import Warm, alone
from compilecache.pipeline import Job, warm
from compilecache.progress import BarProgress, LogProgress, Progress
from compilecache.report import Report
from compilecache.shapes import CompileTarget, EngineName, InputSpec, ShapePlan, plan_of
from compilecache.store import ArtifactStore
from compilecache.tagging import Used, Words, named_plan, tag_run
from compilecache.workload import HasWorkload, Workload, load_workload, workload_of_plan

if TYPE_CHECKING:
    from compilecache.examples import Example

UNPLANNED_ENTRIES = 256
"""Compiled entries to leave room for when shapes may come up while training."""

StoreLike = ArtifactStore | str | Path | Literal[False] | None


def ensure_warm(
    models: nn.Module | Sequence[nn.Module],
    shapes: ShapePlan | str | Path | Sequence[InputSpec] | Sequence[Example],
    *,
    store: StoreLike = None,
    baked: str | Path | None = None,
    workload: Workload | str | None = None,
    root: str | Path | None = None,
    extra_roots: Sequence[str] | None = None,
    compile_options: Mapping[str, JsonValue] | None = None,
    engine: EngineName | None = None,
    compile_once_per_gpu_kind: bool = True,
    strict: bool = False,
    share: bool = True,
    lock_timeout: float = 3600.0,
    rank_timeout: float = 7200.0,
    allow_network_root: bool = False,
    on_miss: OnMiss = "error",
    gate_timeout: float = 600.0,
    progress: Progress | None = None,
) -> Warm:
    """Blocks until every planned shape is compiled and loaded in this process, on every device.

    Restores what the store has, compiles what is missing (one target at a time, under a file lock),
    publishes it, and runs every target twice. The models come back bit for bit as they were:
    parameters, buffers, gradients, train/eval modes, random states. Call it before any thread that
    uses the models starts. From then on, until the result is closed, the process is sealed: what
    would still compile or trace, in any thread, is dealt with as ``on_miss`` says.

    Args:
        models: one module, or one replica per device. Eager ones are compiled in place, as
            ``module.compile(dynamic=False)`` would; compiled ones are left as they are.
        shapes: a plan, the path of a plan file, a list of ``InputSpec``, or plain examples:
            what one step is called with, as keyword mappings, tuples or single tensors (meta
            tensors allowed), for training and evaluation each.
        store: URL or path of the artifact store; None for ``COMPILECACHE_STORE`` or
            ``~/.cache/compilecache/store``; False for none.
        baked: folder of a cache that came with the image (``warmup run --bake``), looked into before
            the store; None for ``COMPILECACHE_BAKED``, else there is none.
        workload: the workload or its ``module:attribute``; by default the model brings it along
            (``compile_workload()``), and plain examples need none.
        root: cache root; None for ``COMPILECACHE_ROOT``, ``TORCHINDUCTOR_CACHE_DIR``, torch's own.
        extra_roots: caches of other compilers to restore before and publish after: "triton", "cuda",
            "flashinfer", "tilelang", "deepgemm", or any "name=folder". None for
            ``COMPILECACHE_EXTRA_ROOTS``, else none.
        compile_options: more keyword arguments of ``torch.compile`` (mode, fullgraph, backend,
            options), on top of the plan's own; they enter the fingerprint.
        engine: "trace": Dynamo traces every shape at every start. "program": shapes are compiled
            ahead of time and loaded without tracing, where they are full graphs; the others go by
            trace, and ``report.gave_up`` says why. "auto": the same, with the reason in the rows of
            the report only. None for the plan's own, which is "trace" unless it says otherwise.
        compile_once_per_gpu_kind: programs compiled on one GPU serve every other of the same kind,
            where the canary finds that they compute the same there. False: each compiles its own.
        strict: raise on cache trouble, failed and never-cached targets. Otherwise trouble with the
            cache never ends a run: it is in ``report.gave_up`` and in the log.
        share: divide the compiling with other processes that start cold on the same store: each target
            is compiled by one of them, and the others wait for its artifact.
        lock_timeout: seconds to wait for another process that fills the same root, and for one that
            compiles a target for this one.
        rank_timeout: seconds to wait for the other ranks of a ``torch.distributed`` job.
        allow_network_root: use a cache root on a network file system all the same.
        on_miss: "error": raise UnexpectedCompile where it happens. "serialize": compile while every
            other worker stands at a step boundary (``warm.step()``), publish, and go on. "warn":
            let torch do what it does, and count it.
        gate_timeout: seconds that "serialize" waits for the other workers.
        progress: who hears of every step; default a bar on a terminal, the log elsewhere.

    Raises:
        PlanError: shapes, workload, devices or modules (DataParallel) that cannot be used.
        RecompileBudgetExceeded: torch would not keep that many compiled entries.
        LockTimeout: another process kept the root locked.
        CompileFailed: with ``strict``, or when another rank could not get warm.
        UnexpectedCompile: while workers of an earlier call are alive.
    """
    modules = [models] if isinstance(models, nn.Module) else list(models)
    refuse_unusable(modules)
    replicas = [Replica(device_of(module), module) for module in modules]
    chosen, plan = _workload_and_plan(modules, shapes, workload)
    options = {**plan.compile_options, **(compile_options or {})}
    changes = {"compile_options": options, "engine": engine or plan.engine}
    plan = ShapePlan.parse({**plan.model_dump(), **changes})
    once = compile_once_per_gpu_kind
    extras = None if extra_roots is None else tuple(extra_roots)
    request = _Request(chosen, plan, replicas, strict, share, lock_timeout, on_miss, once, extras)
    outcome: Warm | CompileCacheError
    try:
        with alone():
            ready = request.run(root, store, baked, allow_network_root, progress)
        outcome = request.seal(ready, gate_timeout)
    except CompileCacheError as error:
        outcome = error
    failed = isinstance(outcome, CompileCacheError)
    try:
        ranks.agree(str(outcome) if failed else None, timeout=rank_timeout)
    except CompileCacheError as error:
        if isinstance(outcome, Warm):
            outcome.close()
        outcome = outcome if failed else error
    if isinstance(outcome, CompileCacheError):
        raise outcome
    return outcome


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a warm-up leaves behind for later."""

    report: Report
    cache: CacheDir
    store: ArtifactStore | None


@dataclass(frozen=True, slots=True)
class _Request:
    workload: Workload
    plan: ShapePlan
    replicas: list[Replica]
    strict: bool
    share: bool
    lock_timeout: float
    on_miss: OnMiss
    once_per_kind: bool
    extras: tuple[str, ...] | None

    def run(
        self,
        root: str | Path | None,
        store: StoreLike,
        baked: str | Path | None,
        allow_network_root: bool,
        progress: Progress | None,
    ) -> _Ready:
        troubles: list[str] = []
        cache = self._root(root, allow_network_root, troubles)
        opened = self._store(store, troubles)
        image = self._baked(baked, troubles)
        with ExitStack() as stack:
            teller = progress or _progress(stack)
            for trouble in troubles:
                teller.trouble(trouble)
            try:
                report = warm(self._job(cache, opened, image), self.replicas, teller)
            except LockTimeout as error:
                if self.strict:
                    raise
                troubles.append(f"{error} This process compiles in a folder of its own.")
                teller.trouble(troubles[-1])
                cache = _own_root()
                report = warm(self._job(cache, opened, image), self.replicas, teller)
        gave_up = (*troubles, *report.gave_up)
        return _Ready(report.model_copy(update={"gave_up": gave_up}), cache, opened)

    def seal(self, ready: _Ready, gate_timeout: float) -> Warm:
        """Lets a thread per replica find everything once, then seals the process."""
        failed = frozenset(row.key for row in ready.report.targets if row.status == "failed")
        planned = Planned(self.workload, self._job(ready.cache, ready.store).targets, failed)
        harness = Harness(self.workload, ready.cache, self.plan.compile_options)
        state = ThreadState()
        problems = find_in_threads(planned, self.replicas, harness, state, self.strict)
        gave_up = (*ready.report.gave_up, *problems)
        return Warm(
            ready.report.model_copy(update={"gave_up": gave_up}),
            self.plan,
            planned,
            [function for replica in self.replicas for function in self._functions(replica)],
            state,
            on_miss=self.on_miss,
            gate_timeout=gate_timeout,
            extend=partial(self._extend, ready),
            tagger=None if ready.store is None else partial(self._tag, ready, ready.store),
        )

    def _tag(
        self,
        ready: _Ready,
        store: ArtifactStore,
        name: str,
        plan: ShapePlan,
        words: Words,
    ) -> str | None:
        plan = named_plan(plan, self.workload)
        devices = list(dict.fromkeys(replica.device for replica in self.replicas))
        used = Used(ready.report.fingerprint, plan, plan.targets(devices), ready.cache)
        return tag_run(name, used, store, words, strict=self.strict)

    def _functions(self, replica: Replica) -> Iterator[PlannedFunction]:
        names = {spec.function for spec in self.plan.specs}
        for name, function in self.workload.functions(replica.module).items():
            if name in names:
                codes = frozenset(torch_names.codes_of(torch_names.original(function)))
                yield PlannedFunction(name, replica.device, function, replica.module, codes)

    def _extend(self, ready: _Ready, target: CompileTarget, function: PlannedFunction) -> Report:
        # All workers stand still meanwhile: waiting for a stranger's artifact would cost them more.
        job = replace(
            self._job(ready.cache, ready.store),
            targets=(target,),
            strict=False,
            share=False,
            extras=(),
        )
        return warm(job, [Replica(function.device, function.replica)], LogProgress())

    def _job(
        self, cache: CacheDir, store: ArtifactStore | None, baked: ArtifactStore | None = None
    ) -> Job:
        per_device = Counter(replica.device for replica in self.replicas)
        return Job(
            workload=self.workload,
            targets=self.plan.targets(list(per_device)),
            cache=cache,
            store=store,
            baked=baked,
            options=self.plan.compile_options,
            engine=self.plan.engine,
            compile_once_per_gpu_kind=self.once_per_kind,
            instances=max(per_device.values()),
            strict=self.strict,
            share=self.share,
            lock_timeout=self.lock_timeout,
            extras=found_extras(self.extras, cache),
            spare=UNPLANNED_ENTRIES if self.on_miss == "serialize" else SPARE_ENTRIES,
        )

    def _root(self, root: str | Path | None, allow_network: bool, troubles: list[str]) -> CacheDir:
        cache = CacheDir(root)
        try:
            cache.prepare(allow_network=allow_network)
        except CompileCacheError as error:
            if self.strict:
                raise
            troubles.append(f"{error} This process compiles in a folder of its own.")
            return _own_root()
        return cache

    def _store(self, store: StoreLike, troubles: list[str]) -> ArtifactStore | None:
        if store is False:
            return None
        if isinstance(store, ArtifactStore):
            return store
        try:
            return ArtifactStore.open(store)
        except CompileCacheError as error:
            if self.strict:
                raise
            troubles.append(f"no store: {error}")
            return None

    def _baked(self, baked: str | Path | None, troubles: list[str]) -> ArtifactStore | None:
        try:
            return open_baked(baked)
        except (CompileCacheError, OSError) as error:
            if self.strict:
                raise
            troubles.append(f"nothing of the image: {error}")
            return None


def _own_root() -> CacheDir:
    """A fresh folder for this process alone, when the one it should use cannot be used."""
    cache = CacheDir(tempfile.mkdtemp(prefix="compilecache-"))
    cache.prepare()
    return cache


def _progress(stack: ExitStack) -> Progress:
    return stack.enter_context(BarProgress()) if sys.stderr.isatty() else LogProgress()


def refuse_unusable(modules: Sequence[nn.Module]) -> None:
    """Raises PlanError for modules that cannot be kept from compiling in threads."""
    for module in modules:
        for child in module.modules():
            if isinstance(child, nn.DataParallel):
                raise PlanError(
                    "the model is or holds an nn.DataParallel, which makes new replicas in new "
                    "threads at every step, so each would compile",
                    next_step="Pass one replica per device, or use DistributedDataParallel",
                    field="models",
                )


def device_of(module: nn.Module) -> str:
    """Where a module lives, with its index. Raises PlanError for several devices or none that run."""
    original = torch_names.original(module)
    devices = {tensor.device for tensor in (*original.parameters(), *original.buffers())}
    if len(devices) > 1:
        raise PlanError(
            f"model {type(original).__name__} lies on {sorted(map(str, devices))}",
            next_step="Put each replica on one device before ensure_warm",
            field="models",
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"model {type(original).__name__} lies on device '{device}'",
            next_step="Move it to a CUDA device or the CPU before ensure_warm",
            field="models",
        )
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def _workload_and_plan(
    modules: list[nn.Module],
    shapes: ShapePlan | str | Path | Sequence[InputSpec] | Sequence[Example],
    workload: Workload | str | None,
) -> tuple[Workload, ShapePlan]:
    if not modules:
        raise PlanError("there is no model", next_step="Pass one module or more", field="models")
    original = torch_names.original(modules[0])
    plan = _plan(shapes)
    chosen: Workload
    if isinstance(workload, str):
        chosen = load_workload(workload, plan.settings if plan else None)
    elif workload is not None:
        chosen = workload
    elif isinstance(original, HasWorkload):
        chosen = original.compile_workload()
    elif plan is not None and plan.workload is not None:
        chosen = workload_of_plan(plan)
    else:
        examples = cast("Sequence[Example]", shapes if plan is None else ())
        chosen = ExampleWorkload(examples, module=original)
    if plan is None:
        plan = plan_of(specs_of_examples(cast("Sequence[Example]", shapes), original))
    for spec in plan.specs:
        chosen.check(spec)
    return chosen, plan


def _plan(
    shapes: ShapePlan | str | Path | Sequence[InputSpec] | Sequence[Example],
) -> ShapePlan | None:
    """The plan behind ``shapes``; None when they are plain examples."""
    if isinstance(shapes, ShapePlan):
        return shapes
    if isinstance(shapes, str | Path):
        return ShapePlan.load(shapes)
    specs = [shape for shape in shapes if isinstance(shape, InputSpec)]
    if specs and len(specs) == len(shapes):
        return plan_of(specs)
    return None
