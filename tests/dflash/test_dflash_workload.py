"""The workload: which graphs a run needs, which specs it refuses, and what it feeds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from compilecache.errors import PlanError
from compilecache.shapes import InputSpec
from compilecache.workload import load_workload
from dflash_model.config import DrafterConfig, preset
from dflash_model.model import Drafter
from dflash_model.workload import DFlashWorkload, dflash, tiny

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def specs_of(workload: DFlashWorkload, *lengths: int) -> list[InputSpec]:
    return list(workload.specs(lengths, batch_sizes=[1], phases=["train", "eval"]))


def changed(spec: InputSpec, **dims: object) -> InputSpec:
    """The spec with other dims; None takes one away."""
    merged = {name: value for name, value in (spec.dims | dims).items() if value is not None}
    return InputSpec.model_validate({**spec.model_dump(), "dims": merged})


@pytest.fixture
def mixed(small: DrafterConfig) -> DFlashWorkload:
    """Four anchors, one sliding and one full layer."""
    return DFlashWorkload(small, anchors=4)


def test_factory_and_instance_are_found_by_name() -> None:
    """The command line reaches presets and config files through one factory."""
    made = load_workload("dflash_model.workload:dflash", {"preset": "qwen3-4b", "anchors": 64})
    assert isinstance(made, DFlashWorkload)
    assert (made.anchors, made.drafter_config) == (64, preset("qwen3-4b"))
    assert load_workload("dflash_model.workload:tiny") is tiny


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "preset"),
        ({"preset": "tiny", "config": "config.json"}, "preset"),
        ({"preset": "tiny", "anchors": 0}, "anchors"),
        ({"preset": "tiny", "attention": "sparse"}, "attention"),
        ({"preset": "tiny", "dtype": "int8"}, "dtype"),
        ({"config": "absent.json"}, "config"),
    ],
)
def test_factory_names_the_setting_that_cannot_be_used(
    settings: dict[str, Any], field: str
) -> None:
    """A wrong setting is refused before anything is planned."""
    with pytest.raises(PlanError) as caught:
        dflash(**settings)
    assert caught.value.field == field


def test_specs_are_block_masks_then_forwards(mixed: DFlashWorkload) -> None:
    """A mixed drafter needs two BlockMasks and one forward a phase, for each length (speculators#731: eager, it took 7 GB a step)."""
    lines = [
        f"{s.function} {s.phase} {s.dims['seq_len']} {s.dims['mask']}"
        for s in specs_of(mixed, 64, 128)
    ]
    per_length = [
        "block_mask both {} full",
        "block_mask both {} sliding",
        "forward train {} mixed",
        "forward eval {} mixed",
    ]
    assert lines == [line.format(length) for length in (64, 128) for line in per_length]


@pytest.mark.parametrize(
    ("preset_name", "packed", "masks"),
    [
        ("tiny", False, ["full", "full"]),
        ("tiny", True, ["packed", "packed"]),
        ("qwen3.6-27b", True, ["packed", "packed_sliding", "packed_mixed"]),
    ],
)
def test_kinds_of_mask(preset_name: str, packed: bool, masks: list[str]) -> None:
    """The kind of mask is part of every spec."""
    made = dflash(preset=preset_name, packed=packed)
    specs = made.specs([256], batch_sizes=[1], phases=["train"])
    assert [spec.dims["mask"] for spec in specs] == masks


def test_dense_attention_needs_no_block_mask() -> None:
    """Without flex there is nothing to compile but forward."""
    functions = {spec.function for spec in specs_of(dflash(preset="tiny", attention="dense"), 64)}
    assert functions == {"forward"}


def test_every_planned_spec_passes_its_own_check(mixed: DFlashWorkload) -> None:
    """What specs() gives, check() accepts."""
    for spec in specs_of(mixed, 1, 64, 256):
        mixed.check(spec)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (([0], [1], ["train"]), "seq_len"),
        (([257], [1], ["train"]), "seq_len"),
        (([64], [0], ["train"]), "batch"),
        (([64], [1], ["both"]), "phase"),
    ],
)
def test_request_that_cannot_be_planned_is_named(
    mixed: DFlashWorkload, request_: tuple[Any, Any, Any], field: str
) -> None:
    """An empty row, one past the longest, no rows or an unknown phase: refused when planning."""
    lengths, batches, phases = request_
    with pytest.raises(PlanError) as caught:
        mixed.specs(lengths, batch_sizes=batches, phases=phases)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("dims", "field"),
    [
        ({"heads": 4}, "heads"),
        ({"seq_len": None}, "seq_len"),
        ({"seq_len": 257}, "seq_len"),
        ({"seq_len": "long"}, "seq_len"),
        ({"anchors": 5}, "anchors"),
        ({"block": 8}, "block"),
        ({"mask": "causal"}, "mask"),
        ({"mask": "full"}, "mask"),
        ({"mask_q_len": 128}, "mask_q_len"),
        ({"mask_kv_len": 256}, "mask_kv_len"),
    ],
)
def test_check_names_the_dim_that_cannot_run(
    mixed: DFlashWorkload, dims: dict[str, object], field: str
) -> None:
    """Data-dependent or mistaken dims are refused at plan time (Automodel#2532, speculators#196, 141625)."""
    spec = changed(specs_of(mixed, 64)[-1], **dims)
    with pytest.raises(PlanError, match=f"'{field}'") as caught:
        mixed.check(spec)
    assert caught.value.field == field


def test_stated_mask_lengths_that_agree_are_accepted(mixed: DFlashWorkload) -> None:
    """N·b queries and S + N·b keys may be written down."""
    mixed.check(changed(specs_of(mixed, 64)[-1], mask_q_len=16, mask_kv_len=80))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"function": "backward"}, "function"),
        ({"phase": "both"}, "phase"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"example": {"x": 1}}, "example"),
    ],
)
def test_check_names_the_field_that_cannot_run(
    mixed: DFlashWorkload, change: dict[str, object], field: str
) -> None:
    """Function, phase and dtype must be ones that this drafter has."""
    spec = InputSpec.model_validate({**specs_of(mixed, 64)[-1].model_dump(), **change})
    with pytest.raises(PlanError) as caught:
        mixed.check(spec)
    assert caught.value.field == field


def test_check_gathers_every_fault(mixed: DFlashWorkload) -> None:
    """One error names all dims at fault."""
    spec = changed(specs_of(mixed, 64)[-1], anchors=5, mask="causal", heads=4)
    with pytest.raises(PlanError) as caught:
        mixed.check(spec)
    assert all(f"'{name}'" in str(caught.value) for name in ("anchors", "mask", "heads"))


def test_inputs_are_the_same_for_the_same_spec(mixed: DFlashWorkload) -> None:
    """Inputs depend on the spec alone, and drawing them disturbs no global generator."""
    drafter = mixed.build(CPU)
    train = specs_of(mixed, 64)[2]
    before = torch.random.get_rng_state()
    first, second = (mixed.make_inputs(train, drafter, CPU) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.items():
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, second[name]), name  # type: ignore[arg-type]


def test_inputs_look_like_training_data(mixed: DFlashWorkload) -> None:
    """Loss on most positions, none on the pads at the end, anchors drawn."""
    drafter = mixed.build(CPU)
    inputs: dict[str, Any] = dict(mixed.make_inputs(specs_of(mixed, 128)[2], drafter, CPU))
    assert 0.5 < inputs["loss_mask"].float().mean() < 0.95
    assert not inputs["loss_mask"][:, -8:].any()
    assert inputs["keep"].all()


def test_phase_decides_the_kind_of_mask_on_a_cpu(mixed: DFlashWorkload) -> None:
    """Training takes dense masks, evaluation BlockMasks, whatever the caller's grad mode."""
    drafter = mixed.build(CPU)
    _, _, train, evaluate = specs_of(mixed, 64)
    with torch.no_grad():
        assert isinstance(mixed.make_inputs(train, drafter, CPU)["full_mask"], torch.Tensor)
    assert isinstance(mixed.make_inputs(evaluate, drafter, CPU)["sliding_mask"], BlockMask)


@pytest.mark.parametrize("packed", [False, True])
def test_spec_is_told_from_its_inputs(small: DrafterConfig, packed: bool) -> None:
    """A call is attributed to the spec it was made for, for every function and phase."""
    workload = DFlashWorkload(small, anchors=4, packed=packed)
    drafter = workload.build(CPU)
    for spec in specs_of(workload, 64):
        inputs = workload.make_inputs(spec, drafter, CPU)
        assert workload.spec_of(spec.function, inputs, spec.phase) == spec


def test_other_inputs_belong_to_no_spec(mixed: DFlashWorkload) -> None:
    """A call that is not a step's is not attributed."""
    assert mixed.spec_of("forward", {"x": torch.zeros(1)}, "train") is None
    assert mixed.spec_of("block_mask", {"batch": 1}, "both") is None
    assert mixed.spec_of("flex", {}, "train") is None


def test_step_runs_backward_in_training_only(mixed: DFlashWorkload) -> None:
    """Gradients appear in phase train; evaluation and masks leave none."""
    drafter = mixed.build(CPU)
    for spec in specs_of(mixed, 64):
        drafter.zero_grad(set_to_none=True)
        inputs = mixed.make_inputs(spec, drafter, CPU)
        with torch.set_grad_enabled(spec.phase == "train"):
            loss = mixed.step(spec, drafter, inputs)
        assert (loss is None) == (spec.function == "block_mask")
        assert (drafter.fc.weight.grad is not None) == (spec.phase == "train")


def test_flex_training_on_a_cpu_is_refused_when_inputs_are_made(small: DrafterConfig) -> None:
    """The missing backward is said before anything compiles (pytorch#148752)."""
    workload = DFlashWorkload(small, anchors=4, attention="flex")
    train = workload.specs([64], batch_sizes=[1], phases=["train"])[-1]
    with pytest.raises(PlanError, match="no backward on a CPU"):
        workload.make_inputs(train, workload.build(CPU), CPU)


def test_another_model_is_refused(mixed: DFlashWorkload, small: DrafterConfig) -> None:
    """Neither a stranger nor a drafter with other anchors can be warmed with this workload."""
    with pytest.raises(PlanError, match="is a Linear, not a Drafter"):
        mixed.functions(torch.nn.Linear(1, 1))
    with pytest.raises(PlanError, match="other anchors"):
        mixed.functions(Drafter(small, anchors=5))


def test_config_changes_with_every_setting(small: DrafterConfig) -> None:
    """Whatever changes the compiled code shows in what enters the fingerprint."""
    base = DFlashWorkload(small, anchors=4)
    others = [
        DFlashWorkload(small, anchors=5),
        DFlashWorkload(small, anchors=4, attention="dense"),
        DFlashWorkload(small, anchors=4, dtype="bfloat16"),
        DFlashWorkload(small, anchors=4, packed=True),
        DFlashWorkload(replace(small, sliding_window=7), anchors=4),
        DFlashWorkload(replace(small, rope_theta=1e5), anchors=4),
    ]
    assert all(other.config() != base.config() for other in others)
    assert DFlashWorkload(small, anchors=4).config() == base.config()


def test_sources_are_modules_of_this_package() -> None:
    """Every traced module can be found for its syntax tree."""
    from importlib.util import find_spec

    assert all(find_spec(name) is not None for name in tiny.sources())
