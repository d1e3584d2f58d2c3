"""Warming a plan for a GPU that is not there, in a process of its own: nothing is replaced in this one.

``compilecache warm --gpu-profile`` starts it as ``python -m compilecache.offline REQUEST RESULT``. Importing this
module does not import torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from compilecache import child
from compilecache.cachedir import LOCK_TIMEOUT
from compilecache.child import Failure, ask
from compilecache.errors import CompileCacheError, CompileFailed, PlanError
from compilecache.gpuprofile import GpuProfile
from compilecache.report import Report
from compilecache.shapes import TARGET_LIMIT, ShapePlan

DEVICE = "cuda:0"
"""What is compiled for: a program of one index serves them all."""
PATIENCE = 10.0
"""Seconds to let go of locks and claims when it is to end."""
NOTICE = (
    "compiling without the GPU is experimental: the first start with a real '{name}' compares each "
    "program with eager, and settles it"
)


class Request(BaseModel):
    """What the process is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: ShapePlan
    profile: GpuProfile
    root: Path
    store: str | None = None
    """As on the command line; "none" for no store."""
    baked: Path | None = None
    sign_key: Path | None = None
    trust_keys: tuple[Path, ...] = ()
    strict: bool = False
    share: bool = True
    limit: int = TARGET_LIMIT
    """How many targets a plan may have."""
    lock_timeout: float = LOCK_TIMEOUT


class Result(BaseModel):
    """What became of it."""

    report: Report | None = None
    failure: Failure | None = None


def refuse_plan(plan: ShapePlan) -> None:
    """Raises PlanError for a plan of which nothing can be compiled without its GPU."""
    if plan.engine == "trace":
        raise PlanError(
            "the plan is for engine 'trace', which runs what it compiles",
            next_step="Use 'engine: program' in the plan, or --engine program",
            field="engine",
        )


def warm_offline(request: Request) -> Report:
    """Compiles the plan for the profile's GPU in a process that sees none. Raises as ``warm_plan``."""
    refuse_plan(request.plan)
    result = ask(
        "compilecache.offline",
        request,
        Result,
        environment_of(request.root),
        who="process that compiles without a GPU",
        next_step="or compile where the GPU is",
        patience=PATIENCE,
    )
    if result.failure is not None:
        raise result.failure.error()
    assert result.report is not None
    return result.report


def environment_of(root: Path) -> dict[str, str]:
    """Of the process: no GPU, and compile workers that are forked from it, with what it replaced."""
    return {
        **child.environment_of(root),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_WORKER_START": "fork",
    }


# -- inside of the process -------------------------------------------------------------------------


@contextmanager
def without_gpu(profile: GpuProfile) -> Iterator[None]:
    """Prepares this process for good, and has compile workers ready. Raises PlanError.

    What the block asks of the GPU outside of any target becomes a CompileFailed.
    """
    from compilecache import absent_gpu, inductor_names
    from compilecache.gpuprofile import refuse_other_versions
    from compilecache.undecided import Refused

    refuse_other_versions(profile)
    absent_gpu.install(profile)
    inductor_names.settle_ptxas()
    absent_gpu.start_workers()
    try:
        yield
    except Refused as error:  # by the workload, while it built its model
        raise CompileFailed(
            f"the model cannot be built without its GPU: {error}",
            next_step="Let the workload not ask the GPU, or compile where it is",
            target="offline process",
        ) from error
    finally:
        absent_gpu.end_workers()


def carry_out(request: Request) -> Report:
    """Warms in this process. Raises as ``warm_plan``."""
    with without_gpu(request.profile):
        from compilecache.baked import open_baked
        from compilecache.cachedir import CacheDir
        from compilecache.jobs import warm_plan
        from compilecache.progress import LineProgress
        from compilecache.store import ArtifactStore

        cache = CacheDir(request.root)
        cache.prepare(allow_network=True)  # whoever asked has looked
        store = None
        if request.store != "none":
            keys = request.trust_keys or None
            store = ArtifactStore.open(request.store, sign_key=request.sign_key, trust_keys=keys)
        progress = LineProgress()
        progress.trouble(NOTICE.format(name=request.profile.name))
        return warm_plan(
            request.plan,
            [DEVICE],
            cache,
            store,
            baked=open_baked(request.baked, request.trust_keys or None),
            progress=progress,
            strict=request.strict,
            share=request.share,
            limit=request.limit,
            lock_timeout=request.lock_timeout,
            profile=request.profile,
        )


def main() -> None:
    """Entry point of the process."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    request = Request.model_validate_json(Path(sys.argv[1]).read_bytes())
    signal.signal(signal.SIGTERM, _ended)
    try:
        result = Result(report=carry_out(request))
    except CompileCacheError as error:
        result = Result(failure=Failure.of(error))
    Path(sys.argv[2]).write_text(result.model_dump_json(), encoding="utf-8")


def _ended(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
