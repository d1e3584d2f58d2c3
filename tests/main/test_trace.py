"""The engine: budgets, targets that cannot settle, and torch's private names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import Template
from torch import nn
from training import model_of, train
from workloads import Changing, Product, plan, rows

from compilecache import inductor_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.engines.harness import Replica
from compilecache.engines.trace import TraceEngine
from compilecache.ensure import ensure_warm
from compilecache.errors import CompileCacheError, CompileFailed, PlanError, RecompileBudgetExceeded
from compilecache.examples import ExampleWorkload
from compilecache.report import Report
from compilecache.torch_names import Counts, Limits

EAGER = {"backend": "eager"}
COUNTS = list(range(2, 14))
"""Twelve shapes: more than the eight entries that torch keeps for a code object by itself."""


def _many(folder: Path, instances: int) -> tuple[Report, int]:
    models = [model_of("Product") for _ in range(instances)]
    report = ensure_warm(
        models,
        plan("product", COUNTS),
        workload="workloads:product",
        store=False,
        root=folder,
        compile_options=EAGER,
        strict=True,
    ).report
    before = torch_names.counts()
    for model in models:
        train(model, COUNTS, report)
    return report, torch_names.counts().since(before).frames


@pytest.mark.parametrize("instances", [1, 2])
def test_more_shapes_than_torch_keeps(fresh: Template, tmp_path: Path, instances: int) -> None:
    """vllm#27178: past the ninth shape the slow path ran in silence; here all twelve are compiled."""
    assert Limits(8, 256) == fresh.call(torch_names.limits)
    report, later = fresh.call(_many, tmp_path, instances)
    assert report.warm
    assert len(report.targets) == 12
    assert later == 0


def _two_at_most(folder: Path) -> RecompileBudgetExceeded | None:
    model = Product()
    model.compile(dynamic=False, backend="eager", recompile_limit=2)
    try:
        ensure_warm(
            model, [rows(count) for count in (2, 3, 4)], store=False, root=folder, strict=False
        )
    except RecompileBudgetExceeded as error:
        return error.problem, error.next_step  # type: ignore[return-value]
    return None


@pytest.mark.skipif(not torch_names.takes_recompile_limit(), reason="torch.compile takes no limit")
def test_a_module_that_was_compiled_with_too_small_a_limit(fresh: Template, tmp_path: Path) -> None:
    """137081: an error before anything runs, also without strict, with both numbers and the way out."""
    told = fresh.call(_two_at_most, tmp_path)
    assert told is not None
    assert "needs 6 compiled entries" in told[0]
    assert "recompile_limit=2" in told[0]
    assert "recompile_limit=6" in told[1]


def _changing(folder: Path) -> str:
    try:
        ensure_warm(
            Changing(), [rows(2)], store=False, root=folder, compile_options=EAGER, strict=True
        )
    except CompileFailed as error:
        return str(error)
    return "nothing"


def test_a_target_that_compiles_on_every_call(fresh: Template, tmp_path: Path) -> None:
    """It can never be warm, so it is an error that says how to find the reason."""
    told = fresh.call(_changing, tmp_path)
    assert "compiles again on every call" in told
    assert "TORCH_LOGS=recompiles" in told


def test_a_function_that_the_workload_does_not_have(tmp_path: Path) -> None:
    """The plan's field is named, with the functions there are."""
    engine = TraceEngine(ExampleWorkload(), CacheDir(tmp_path))
    specs = plan("product", [2]).specs
    wrong = specs[0].model_copy(update={"function": "backward"})
    targets = plan("product", [2]).model_copy(update={"specs": (wrong,)}).targets(["cpu"])
    with pytest.raises(PlanError, match=r"'backward', the workload has \['forward'\]"):
        engine.compile_in_place(Replica("cpu", Product()), targets)


def _in_inference_mode(folder: Path) -> tuple[Report, int]:
    model = model_of("Product")
    with torch.inference_mode():
        report = ensure_warm(
            model, [rows(2)], store=False, root=folder, compile_options=EAGER, strict=True
        ).report
    return report, train(model, [2], report).later.frames


def test_called_in_inference_mode(fresh: Template, tmp_path: Path) -> None:
    """141790 again: training targets run their backward wherever ensure_warm is called."""
    report, later = fresh.call(_in_inference_mode, tmp_path)
    assert report.warm
    assert later == 0


def test_torch_has_every_private_name() -> None:
    """When this fails, the list says which name of which module to replace in torch_names.py."""
    assert torch_names.missing() == []
    assert inductor_names.missing() == []


def test_a_name_that_torch_lacks_is_told() -> None:
    """As the path that would have been imported."""
    assert not torch_names._has("torch._dynamo.config", "no_such_setting")
    assert not torch_names._has("torch.no_such_module", "name")
    assert torch_names._has("torch.nn", "Module._compiled_call_impl")


def _probes(folder: Path) -> dict[str, object]:
    model, seen = Product(), []
    code = Product.forward.__code__
    found: dict[str, object] = {
        "original of eager": torch_names.original(model) is model,
        "eager is compiled": torch_names.is_compiled(model),
        "entries before": torch_names.cache_entries(code),
    }
    with torch_names.on_compile(seen.append):
        wrapped = torch.compile(model, backend="eager", dynamic=False)
        before = torch_names.counts()
        wrapped(torch.ones(2, 8))
    wrapped(torch.ones(3, 8))
    torch_names.raise_limits(Limits(20, 10))
    return found | {
        "original of wrapped": torch_names.original(wrapped) is model,
        "wrapped is compiled": torch_names.is_compiled(wrapped),
        "entries after": torch_names.cache_entries(code),
        "frames": torch_names.counts().since(before).frames,
        "callbacks": seen,
        "limits": torch_names.limits(),
        "directory": inductor_names.default_cache_dir(),
        "bundles": inductor_names.bundles_triton(),
    }


def test_each_private_name_does_what_it_is_taken_for(fresh: Template, tmp_path: Path) -> None:
    """Behaviour is probed, version numbers are not."""
    found = fresh.call(_probes, tmp_path)
    assert found["original of eager"] is True
    assert found["eager is compiled"] is False
    assert found["entries before"] == 0
    assert found["original of wrapped"] is True
    assert found["wrapped is compiled"] is True
    assert found["entries after"] == 2
    assert found["frames"] == 2
    assert len(found["callbacks"]) == 1  # type: ignore[arg-type]
    assert found["limits"] == Limits(20, 256)
    assert "torchinductor_" in str(found["directory"])
    assert isinstance(found["bundles"], bool)


def test_counts_are_subtracted_field_by_field() -> None:
    """What came after."""
    assert Counts(5, 4, 3, 2).since(Counts(1, 1, 1, 1)) == Counts(4, 3, 2, 1)


@pytest.mark.parametrize("nested", [False, True])
def test_the_limit_error_is_known_by_its_kind(nested: bool) -> None:
    """Also when something else was raised because of it."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    error: BaseException = FailOnRecompileLimitHit("recompile_limit reached")
    if nested:
        outer = RuntimeError("while compiling")
        outer.__cause__ = error
        error = outer
    assert torch_names.is_limit_error(error)
    assert not torch_names.is_limit_error(RuntimeError("other"))


def _placed_nowhere(_: Path) -> list[str]:
    found = []
    for model in (Product().to("meta"), nn.ModuleList([Product(), Product().to("meta")])):
        try:
            ensure_warm(model, [rows(2)], store=False)
        except CompileCacheError as error:
            found.append(str(error))
    return found


def test_models_that_lie_nowhere(fresh: Template, tmp_path: Path) -> None:
    """Said before anything runs: on the meta device, or on two."""
    meta, both = fresh.call(_placed_nowhere, tmp_path)
    assert "device 'meta'" in meta
    assert "['cpu', 'meta']" in both


def _left_eager(folder: Path) -> tuple[str, ...]:
    with ensure_warm(Product(), [rows(2)], store=False, root=folder, compile_options=EAGER) as warm:
        return warm.report.gave_up


def test_a_model_that_torch_leaves_eager_is_named(fresh: Template, tmp_path: Path) -> None:
    """Nothing to find in a cache, and as slow as without: said, not silent."""
    told = fresh.call(_left_eager, tmp_path, env={"TORCHDYNAMO_DISABLE": "1"})
    assert len(told) == 2
    assert all("torch compiled nothing of forward" in line for line in told)


def _bare(folder: Path) -> tuple[tuple[str, ...], int, str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with ensure_warm(
        model, [(torch.ones(2, 8),)], store=False, root=folder, compile_options=EAGER
    ) as warm:
        entries = torch_names.entries_of(model)
        try:
            model(torch.ones(3, 8))
        except CompileCacheError as error:
            return warm.report.gave_up, entries, str(error)
    return warm.report.gave_up, entries, ""


def test_a_bare_module_of_torch_is_compiled_and_sealed(fresh: Template, tmp_path: Path) -> None:
    """Dynamo skips the frames of torch.nn; called through a wrapper they are compiled."""
    gave_up, entries, refused = fresh.call(_bare, tmp_path)
    assert gave_up == ()
    assert entries == 2
    assert "would compile Sequential.forward" in refused
    assert "input.shape[0] is 3, planned is 2" in refused
