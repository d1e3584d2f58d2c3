"""What only a plan can tell: the published fingerprint that comes nearest, and graphs that are never cached."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from compilecache import inductor_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.doctor.finding import Finding
from compilecache.engines.harness import Replica
from compilecache.engines.trace import TraceEngine
from compilecache.errors import CompileCacheError
from compilecache.fingerprint import Fingerprint
from compilecache.packages import packages_of
from compilecache.replicas import build_replicas
from compilecache.search import Published, Search
from compilecache.shapes import CompileTarget, InputSpec, ShapePlan, TensorSpec
from compilecache.store import ArtifactStore
from compilecache.workload import workload_of_plan


@dataclass(frozen=True, slots=True)
class Nearest:
    """The published fingerprint that comes nearest, and what was installed there."""

    published: Published | None
    """None when nothing is published."""
    packages: Mapping[str, str] | None
    """None when that is not known."""


def nearest_of(mark: Fingerprint, cache: CacheDir, store: ArtifactStore) -> Nearest:
    """Asks the store; a store that fails has been found by its own check."""
    search = Search(cache, store, mark, rewriting=False)
    near = search.nearest()
    if near is None:
        return Nearest(None, None)
    text = store.get_fingerprint(near.digest) or ""
    return Nearest(near, packages_of(text))


def check_fingerprint(near: Published | None, plan: str) -> Iterator[Finding]:
    """What differs from the nearest one; ``plan``: the file, for commands."""
    if near is None:
        yield Finding(
            "nothing is published for this workload",
            "The first start compiles every target.",
            f"compilecache warm {shlex.quote(plan)}",
            "note",
        )
        return
    if not near.changed:
        yield Finding(f"the store has {near.targets} targets of this very fingerprint")
        return
    rest: dict[bool, list[str]] = {True: [], False: []}
    for name, (there, here) in near.changed.items():
        fix = _command(name, there)
        heavy = near.weights[name]
        if fix is None:
            rest[heavy.matters].append(name)
            continue
        known = "OMP_NUM_THREADS: torch uses" if name == "cpu.threads" else f"{name} is"
        yield Finding(
            f"{known} {here}, published: {there}",
            f"{heavy.because}. What is published under {near.digest[:12]} is not found.",
            fix,
            "warning",
        )
    for matters, names in rest.items():
        if names:
            kind = "known to matter" if matters else "kept apart only to be on the safe side"
            yield Finding(
                f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'} from the nearest "
                f"published fingerprint {near.digest[:12]}",
                f"What is published there is not found here; {kind}.",
                f"compilecache explain {shlex.quote(plan)}",
                "warning",
            )


def _command(name: str, there: str) -> str | None:
    variable = "OMP_NUM_THREADS" if name == "cpu.threads" else name.removeprefix("env.")
    if name != "cpu.threads" and not name.startswith("env."):
        return None
    return f"unset {variable}" if there == "absent" else f"export {variable}={shlex.quote(there)}"


# -- graphs that torch never caches -----------------------------------------------------------


def check_bypasses(plan: ShapePlan, device: str) -> Iterator[Finding]:
    """Compiles one spec of each function and phase, the smallest, into a folder that is thrown away."""
    workload = workload_of_plan(plan)
    replica = next(build_replicas(workload, [device]))
    targets = [CompileTarget(spec, device) for spec in smallest(plan.specs)]
    with tempfile.TemporaryDirectory(prefix="compilecache-doctor-") as folder, _kept_variables():
        cache = CacheDir(folder)
        cache.prepare(allow_network=True)
        cache.use()
        engine = TraceEngine(workload, cache, plan.compile_options)
        engine.compile_in_place(replica, targets)
        for target in targets:
            yield from _bypasses(engine, target, replica)


def _bypasses(engine: TraceEngine, target: CompileTarget, replica: Replica) -> Iterator[Finding]:
    start = torch_names.counts()
    try:
        with inductor_names.noting_bypasses() as noted:
            engine.once(target, replica.module)
    except CompileCacheError as error:
        yield Finding(error.problem, "It cannot be warm anywhere.", error.next_step, "error")
        return
    yield from (_bypass(target, bypass) for bypass in noted.values())
    seen = torch_names.counts().since(start)
    if seen.bypasses and not noted:
        yield _bypass(target, inductor_names.Bypass("torch gave no reason"))
    elif not (seen.hits or seen.misses or seen.bypasses):
        yield Finding(
            f"torch compiled nothing of {target}",
            "It runs as it is, as slowly as without torch.compile, and there is nothing to cache.",
            "export TORCH_LOGS=dynamo  # then run the step: it says why",
            "warning",
        )
    elif not seen.bypasses:
        yield Finding(f"torch caches every graph of {target}")


def _bypass(target: CompileTarget, bypass: inductor_names.Bypass) -> Finding:
    node = f" at {bypass.node}" if bypass.node else ""
    line = f" ({bypass.line})" if bypass.line else ""
    why = "It compiles on every start; no store helps it."
    fix = "Write that part with plain operators, or call it outside of the compiled function"
    if bypass.node and "autograd_function_apply" in bypass.node:
        why += (
            " If the backward depends on nothing but its inputs, torch may cache it; else write it "
            "with plain operators."
        )
        fix = "export TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1  # there too"
    return Finding(
        f"torch never caches a graph of {target}{node}{line}: {bypass.reason}",
        why,
        fix,
        "warning",
    )


@contextmanager
def _kept_variables() -> Iterator[None]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def smallest(specs: Sequence[InputSpec]) -> list[InputSpec]:
    """Of each function and phase the spec with the smallest sizes."""
    chosen: dict[tuple[str, str], InputSpec] = {}
    for spec in specs:
        key = (spec.function, spec.phase)
        if key not in chosen or _size(spec) < _size(chosen[key]):
            chosen[key] = spec
    return list(chosen.values())


def _size(spec: InputSpec) -> int:
    sizes = [value for value in spec.dims.values() if isinstance(value, int)]
    tensors = [one for one in (spec.example or {}).values() if isinstance(one, TensorSpec)]
    return math.prod(sizes) * sum([math.prod(tensor.shape) for tensor in tensors] or [1])
