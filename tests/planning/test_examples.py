"""Plain examples of any module: described, realised, stepped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from compilecache.errors import PlanError
from compilecache.examples import ExampleWorkload, default_step, specs_of_examples
from compilecache.shapes import InputSpec, ShapePlan, TensorSpec, plan_of

CPU = torch.device("cpu")


class Net(nn.Module):
    """Takes a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, **extra: object
    ) -> dict[str, object]:
        """A dictionary, as Hugging Face's outputs are."""
        return {"out": self.linear(x) * scale, "mask": mask, "ids": torch.ones(2, dtype=torch.long)}


def remade(example: object, module: nn.Module) -> dict[str, object]:
    """The inputs that come of an example once its plan was written and read again."""
    (spec,) = specs_of_examples([example], module, phases=["train"])  # type: ignore[list-item]
    plan = ShapePlan.parse(plan_of([spec]).model_dump(mode="json"))
    return dict(ExampleWorkload().make_inputs(plan.specs[0], module, CPU))


def test_each_example_is_planned_in_each_phase() -> None:
    """Equal examples are planned once; the dtype is the module's."""
    examples = [{"x": torch.ones(2, 4)}, {"x": torch.zeros(2, 4)}, {"x": torch.ones(3, 4)}]
    specs = specs_of_examples(examples, Net().bfloat16())
    assert [(spec.phase, str(spec)) for spec in specs] == [
        ("train", "forward train x=[2,4]"),
        ("eval", "forward eval x=[2,4]"),
        ("train", "forward train x=[3,4]"),
        ("eval", "forward eval x=[3,4]"),
    ]
    assert {spec.dtype for spec in specs} == {"bfloat16"}


def test_positional_examples_are_named_by_the_signature() -> None:
    """A tuple, and a single tensor, name the same arguments, but are passed by position."""
    x, mask = torch.ones(2, 4), torch.ones(2, dtype=torch.bool)
    net = Net()
    named = specs_of_examples([{"x": x, "mask": mask}], net)
    by_position = specs_of_examples([(x, mask)], net)
    assert [spec.example for spec in by_position] == [spec.example for spec in named]
    assert [spec.positional for spec in (*by_position, *named)] == [2, 2, 0, 0]
    assert specs_of_examples([x], net)[0].positional == 1


def test_arguments_are_passed_as_the_example_passed_them() -> None:
    """By version of torch a call by name and one by position are two compiled graphs."""
    calls: list[tuple[int, list[str]]] = []

    def function(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append((len(args), list(kwargs)))
        return torch.ones(1)

    x, mask = torch.ones(2, 4), torch.ones(2, dtype=torch.bool)
    for example in (x, (x, mask), {"x": x, "mask": mask}):
        spec = specs_of_examples([example], Net(), phases=["eval"])[0]
        default_step(function, remade(example, Net()), spec)
    assert calls == [(1, []), (2, []), (0, ["x", "mask"])]


def test_meta_tensors_become_floats_normal_integers_zero_bools_true() -> None:
    """And integers named as a mask become one; sizes, dtypes and strides are the example's."""
    meta = torch.device("meta")
    example = {
        "x": torch.empty(4, 2, device=meta).t(),
        "ids": torch.empty(3, dtype=torch.long, device=meta),
        "keep": torch.empty(3, dtype=torch.bool, device=meta),
        "attention_mask": torch.empty(3, dtype=torch.long, device=meta),
        "wide": torch.empty(1, 4, device=meta, requires_grad=True).expand(3, 4),
        "small": torch.empty(2, dtype=torch.float8_e4m3fn, device=meta),
    }
    made = remade(example, Net())
    x = made["x"]
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.stride(), x.device) == ((2, 4), (1, 2), CPU)
    assert x.std() > 0.1
    assert torch.equal(made["ids"], torch.zeros(3, dtype=torch.long))  # type: ignore[arg-type]
    assert torch.equal(made["keep"], torch.ones(3, dtype=torch.bool))  # type: ignore[arg-type]
    assert torch.equal(made["attention_mask"], torch.ones(3, dtype=torch.long))  # type: ignore[arg-type]
    wide = made["wide"]
    assert isinstance(wide, torch.Tensor)
    assert (wide.stride(), wide.requires_grad, wide.is_leaf) == ((0, 1), True, True)
    assert made["small"].dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]


def test_given_values_are_used_and_left_alone() -> None:
    """The very values, in new tensors, also for expanded and transposed ones."""
    x = torch.randn(1, 4).expand(2, 4)
    mask = torch.arange(6).view(2, 3).t()[1:]
    net = Net()
    workload = ExampleWorkload([{"x": x, "mask": mask}], module=net)
    (spec,) = specs_of_examples([{"x": x, "mask": mask}], net, phases=["eval"])
    made = workload.make_inputs(spec, net, CPU)
    for name, given in (("x", x), ("mask", mask)):
        tensor = made[name]
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, given)
        assert tensor.stride() == given.stride()
        assert tensor.data_ptr() != given.data_ptr()


def test_inputs_are_the_same_each_time_and_leave_the_global_generator_alone() -> None:
    """Two processes that warm the same spec see the same values."""
    net = Net()
    before = torch.get_rng_state()
    spec = InputSpec(example={"x": TensorSpec(shape=(5, 5), dtype="float32")})
    first, second = (ExampleWorkload().make_inputs(spec, net, CPU)["x"] for _ in range(2))
    assert torch.equal(first, second)  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_containers_and_constants_come_back_as_they_were() -> None:
    """Lists, tuples, dictionaries, numbers, strings and None survive the plan file."""
    example = {"x": torch.ones(1, 4), "scale": 2.5, "states": [(torch.ones(2), 3), {"h": None}]}
    made = remade(example, Net())
    states = made["states"]
    assert made["scale"] == 2.5
    assert isinstance(states, list)
    assert isinstance(states[0], tuple)
    assert states[0][0].shape == (2,)
    assert states[0][1] == 3
    assert states[1] == {"h": None}


def test_the_default_step_sums_floating_outputs_in_float32_and_goes_backward() -> None:
    """Only in phase train, and only where a gradient is wanted."""
    net = Net().bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    loss = default_step(net, {"x": x}, InputSpec(phase="train"))
    assert loss is not None
    assert loss.dtype == torch.float32
    assert net.linear.weight.grad is not None
    net.zero_grad()
    default_step(net, {"x": x}, InputSpec(phase="eval"))
    assert net.linear.weight.grad is None
    assert default_step(lambda: torch.ones(2, dtype=torch.long), {}, InputSpec()) is None
    frozen = default_step(net.requires_grad_(False), {"x": x}, InputSpec(phase="train"))
    assert frozen is not None
    assert not frozen.requires_grad


def test_the_default_step_finds_tensors_in_dataclasses_and_hugging_face_outputs() -> None:
    """Nested anywhere in the output."""
    from transformers.modeling_outputs import CausalLMOutput

    @dataclass
    class Output:
        inner: list[torch.Tensor]
        note: str

    part = torch.full((3,), 2.0)
    outputs = CausalLMOutput(loss=part.sum(), logits=part)
    assert default_step(lambda: Output([part], "x"), {}, InputSpec()) == 6
    assert default_step(lambda: (outputs, {"y": part}), {}, InputSpec()) == 18


def test_a_call_is_told_by_its_spec() -> None:
    """spec_of answers with the spec that specs_of_examples planned; None for what no plan holds."""
    net = Net()
    example = {"x": torch.ones(2, 4)}
    workload = ExampleWorkload([example], module=net)
    assert workload.spec_of("forward", example, "eval") == specs_of_examples([example], net)[1]
    assert workload.spec_of("forward", {"x": object()}, "eval") is None


def test_a_named_builder_makes_the_module() -> None:
    """So that the command line can warm a plan of plain examples."""
    workload = ExampleWorkload(build="collections:Counter")
    assert workload.origin() == (
        "compilecache.examples:ExampleWorkload",
        {"build": "collections:Counter"},
    )
    with pytest.raises(PlanError, match="returned a Counter, not a module"):
        workload.build(CPU)
    with pytest.raises(PlanError, match="'nowhere:x' builds no module"):
        ExampleWorkload(build="nowhere:x").build(CPU)
    assert isinstance(ExampleWorkload(build="torch.nn:ReLU").build(CPU), nn.ReLU)
    with pytest.raises(PlanError, match="cannot build its model"):
        ExampleWorkload().build(CPU)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"y": torch.ones(1)}, "missing a required argument: 'x'"),
        ((torch.ones(1),) * 4, "has 4 positional arguments, Net.forward names 3"),
        ({"x": torch.ones(2).to_sparse()}, "argument 'x' is a tensor of layout torch.sparse_coo"),
        ({"x": torch.float32}, "argument 'x' is a dtype, which a plan cannot hold"),
        ({"x": [object()]}, r"argument 'x\[0\]' is a object"),
        ("x", "an example is a str"),
    ],
)
def test_an_example_that_no_plan_can_hold_is_refused(example: object, message: str) -> None:
    """The error names the argument."""
    with pytest.raises(PlanError, match=message):
        specs_of_examples([example], Net())  # type: ignore[list-item]


def test_an_unknown_name_is_answered_with_a_near_one() -> None:
    """No examples at all, and an unknown phase, are refused too."""
    with pytest.raises(PlanError, match="Did you mean 'input'"):
        specs_of_examples([{"inputs": torch.ones(1)}], nn.ReLU())
    with pytest.raises(PlanError, match="there are no examples"):
        specs_of_examples([], nn.ReLU())
    with pytest.raises(PlanError, match="there is no phase 'test'"):
        specs_of_examples([torch.ones(1)], nn.ReLU(), phases=["test"])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "holds no example"),
        ({"x": TensorSpec(shape=(1,), dtype="float23")}, "dtype 'float23'. Did you mean 'float32'"),
        ({"x": {"shape": [1], "dtyp": "int8"}}, "argument 'x' looks like a tensor but is not one"),
        ({"x[1]": 1}, "arguments do not fit together"),
    ],
)
def test_a_spec_that_cannot_be_realised_is_refused(
    example: dict[str, object] | None, message: str
) -> None:
    """Before anything runs: a plan file is edited by hand."""
    spec = InputSpec.model_validate({"example": example})
    with pytest.raises(PlanError, match=message):
        ExampleWorkload().check(spec)
