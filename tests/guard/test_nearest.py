"""Which planned spec an error names, and in what words."""

from __future__ import annotations

from compilecache.guard.nearest import nearest
from compilecache.shapes import InputSpec, TensorSpec


def spec(seq_len: int, phase: str = "train", **dims: int) -> InputSpec:
    return InputSpec.model_validate(
        {"phase": phase, "dims": {"seq_len": seq_len, "batch": 1, **dims}}
    )


PLANNED = [spec(512), spec(1024), spec(2048), spec(512, "eval")]


def test_the_next_longer_length_is_the_nearest() -> None:
    """640 can be padded to 1024, not to 512."""
    found = nearest(spec(640), PLANNED)
    assert found is not None
    assert found.spec == spec(1024)
    assert found.differences == ("seq_len is 640, planned is 1024",)


def test_past_the_longest_the_longest_is_named() -> None:
    """There is nothing to pad to."""
    found = nearest(spec(4096), PLANNED)
    assert found is not None
    assert found.differences == ("seq_len is 4096, planned is 2048",)


def test_a_phase_that_is_not_planned_is_the_difference() -> None:
    """The same shape under another grad mode."""
    found = nearest(spec(1024, "eval"), PLANNED)
    assert found is not None
    assert found.differences == ("phase is eval, planned is train",)


def test_one_dimension_off_is_nearer_than_two() -> None:
    """Few differences first, then small ones."""
    found = nearest(
        spec(512, "eval", anchors=3), [spec(512, anchors=4), spec(512, "eval", anchors=9)]
    )
    assert found is not None
    assert found.differences == ("anchors is 3, planned is 9",)


def test_a_planned_call_has_no_difference() -> None:
    """Phase both serves either."""
    both = spec(512, "both")
    found = nearest(spec(512, "train"), [both])
    assert found is not None
    assert found.spec is both
    assert found.differences == ()


def test_another_function_has_nothing_near() -> None:
    """A plan without it."""
    other = InputSpec(function="block_mask", phase="both")
    assert nearest(other, PLANNED) is None


def test_plain_examples_name_the_argument_and_its_dimension() -> None:
    """x.shape[0], dtypes, missing and unplanned arguments."""

    def example(**arguments: object) -> InputSpec:
        return InputSpec.model_validate({"example": arguments})

    planned = example(x=TensorSpec(shape=(3, 8), dtype="float32"), scale=2)
    called = example(x=TensorSpec(shape=(5, 8), dtype="float16"), flag=True)
    found = nearest(called, [planned])
    assert found is not None
    assert found.differences == (
        "x.shape[0] is 5, planned is 3",
        "x.dtype is float16, planned is float32",
        "flag is True, which is not planned",
        "scale is missing, planned is 2",
    )
