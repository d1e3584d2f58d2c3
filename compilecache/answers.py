"""What torch asks a GPU about plans while it traces them, and the GPU's answers, for a profile.

``compilecache gpu-profile --plan`` asks in a process of its own, on an empty cache root, so that nothing is known
beforehand: ``python -m compilecache.answers REQUEST RESULT``. Importing this module does not import torch.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from compilecache import child
from compilecache.child import Failure, ask
from compilecache.errors import CompileCacheError, CompileFailed
from compilecache.gpuprofile import Answer
from compilecache.shapes import CompileTarget, ShapePlan

if TYPE_CHECKING:
    from torch import nn

    from compilecache.engines.harness import Harness


class Request(BaseModel):
    """What the process is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plans: tuple[ShapePlan, ...]
    device: str
    root: Path


class Answers(BaseModel):
    """As a profile has them."""

    attention: dict[str, Answer] = {}
    padding: dict[str, bool] = {}


class Result(BaseModel):
    """What became of it."""

    answers: Answers | None = None
    failure: Failure | None = None


def answers_for(plans: Sequence[ShapePlan], device: str) -> Answers:
    """What torch asks this GPU while it traces every target of the plans. No code is generated.

    Raises PlanError, and CompileFailed naming a target that cannot be traced.
    """
    with tempfile.TemporaryDirectory(prefix="compilecache-") as root:
        result = ask(
            "compilecache.answers",
            Request(plans=tuple(plans), device=device, root=Path(root)),
            Result,
            child.environment_of(Path(root)),
            who="process that asks the GPU",
            next_step="or record the profile without --plan",
        )
    if result.failure is not None:
        raise result.failure.error()
    assert result.answers is not None
    return result.answers


# -- inside of the process -------------------------------------------------------------------------


def collect(request: Request) -> Answers:
    """Asks. Raises as ``answers_for``."""
    import torch

    from compilecache import attention_names
    from compilecache.cachedir import CacheDir
    from compilecache.engines.harness import Harness
    from compilecache.replicas import build_replicas
    from compilecache.workload import workload_of_plan

    cache = CacheDir(request.root)
    cache.prepare(allow_network=True)
    cache.use()
    attention_names.note_own_order(torch.device(request.device))
    answers = Answers()
    for plan in request.plans:
        workload = workload_of_plan(plan)
        for spec in plan.specs:
            workload.check(spec)
        targets = plan.targets([request.device])
        (replica,) = build_replicas(workload, [request.device])
        harness = Harness(workload, cache, plan.compile_options)
        for number, target in enumerate(targets, 1):
            print(f"[{number}/{len(targets)}] asking about {target}", file=sys.stderr, flush=True)
            _ask_about(target, replica.module, harness, answers)
    return answers


def _ask_about(
    target: CompileTarget, module: nn.Module, harness: Harness, answers: Answers
) -> None:
    """Adds what is asked while this target is traced. Raises CompileFailed naming it."""
    import torch

    from compilecache import aot_names, attention_names, padding_names
    from compilecache.engines.harness import first_line, on, phase
    from compilecache.engines.making import at_its_call
    from compilecache.engines.program import unfit
    from compilecache.inductor_names import Traced, tracing_only

    device = torch.device(target.device)
    function = harness.function(target, module)
    questions: list[attention_names.Question] = []

    def trace(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        with (
            attention_names.noting(questions, device.type),
            padding_names.noting(answers.padding),
            suppress(Traced),
            tracing_only(),
        ):
            aot_names.make(function, args, kwargs, harness.options)

    try:
        if reason := unfit(function, harness.options):
            raise _refusal(target, reason)
        with on(device), phase(target.spec, module):
            at_its_call(harness.workload, target, module, function, trace)
        for question in questions:
            if question.kernels != ("MATH",):
                answers.attention[str(question)] = attention_names.answer_to(question, device)
    except CompileCacheError:
        raise
    except Exception as error:  # of torch's own, or of the workload
        raise _refusal(target, first_line(error)) from error


def _refusal(target: CompileTarget, reason: str) -> CompileFailed:
    return CompileFailed(
        f"{target} cannot be traced as a program: {reason}",
        next_step="Drop it from the plan, or change what is named; see docs/programs.md",
        target=str(target),
    )


def main() -> None:
    """Entry point of the process."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    request = Request.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        result = Result(answers=collect(request))
    except CompileCacheError as error:
        result = Result(failure=Failure.of(error))
    Path(sys.argv[2]).write_text(result.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
