"""What torch asks a device while it traces: noted, answered, written down, used; on the CPU, no CUDA needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from offline_models import plan
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compilecache import attention_names, padding_names
from compilecache.answers import answers_for
from compilecache.attention_names import ATTENTION, Facts, Question, answer_to
from compilecache.cli.gpu_profile import gpu_profile
from compilecache.errors import CompileFailed, PlanError
from compilecache.gpuprofile import Answer, GpuProfile
from compilecache.operations import carry_out
from compilecache.undecided import Refused, words_of

CPU = torch.device("cpu")
H200 = GpuProfile.load("h200")


class Attention(nn.Module):
    """Attention over the heads of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 192, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[2, 16, 64], [16, 16] → [2, 16, 64]."""
        q, k, v = self.into(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        causal = mask is None
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)  # asks
        return y.transpose(1, 2).reshape(2, 16, 64)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled before, and nothing is left replaced."""
    torch._dynamo.reset()
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    before = dict(operator.py_kernels)
    yield
    assert operator.py_kernels == before


def stepped(model: nn.Module, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
    """Output and gradients of a compiled step."""
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(*inputs)
    output.sin().sum().backward()
    found = [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def masks() -> dict[str, torch.Tensor | None]:
    """None, one of booleans, one to be added."""
    lower = torch.ones(16, 16, dtype=torch.bool).tril()
    return {"causal": None, "boolean": lower, "added": torch.randn(2, 4, 16, 16)}


def asked(model: nn.Module, *inputs: torch.Tensor | None) -> list[Question]:
    """What is asked about a step."""
    noted: list[Question] = []
    with attention_names.noting(noted, "cpu"):
        stepped(model, *inputs)
    torch._dynamo.reset()
    return noted


@pytest.mark.parametrize("kind", masks())
def test_an_answer_gives_what_torch_gives(kind: str) -> None:
    """Bit for bit, gradients too, after it was a file."""
    model, x, mask = Attention(), torch.randn(2, 16, 64), masks()[kind]
    known = {str(question): answer_to(question, CPU) for question in asked(model, x, mask)}
    profile = GpuProfile.model_validate_json(H200.model_copy(update={"attention": known}).dump())
    assert profile.attention == known
    used: list[Question] = []
    with attention_names.answering(profile.attention, used, "cpu"):
        mine = stepped(model, x, mask)
    assert {str(question) for question in used} == set(known)
    torch._dynamo.reset()
    for one, other in zip(mine, stepped(model, x, mask), strict=True):
        assert torch.equal(one, other)


def test_the_choice_is_asked_about_all_that_it_depends_on() -> None:
    """Sizes, strides, types, gradients, mask, switches and the kernels that are allowed make another question."""

    def question(q: torch.Tensor, mask: torch.Tensor | None = None, **named: Any) -> str:
        noted: list[Question] = []

        def attend(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, mask, **named)

        torch._dynamo.reset()
        with attention_names.noting(noted, "cpu"):
            torch.compile(attend, backend="aot_eager", fullgraph=True)(q, mask)
        assert len({str(one) for one in noted}) == 1
        return str(noted[0])

    q, mask = torch.randn(2, 4, 16, 16), torch.ones(16, 16, dtype=torch.bool)
    two = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(two):
        fewer = question(q)
    with sdpa_kernel(two, set_priority=True):
        ordered = question(q)
    found = [
        question(q),
        question(q[:, :, :8]),
        question(q.transpose(1, 2)),
        question(q.bfloat16()),
        question(q.clone().requires_grad_()),
        question(q, mask),
        question(q, mask.float()),
        question(q, dropout_p=0.5),
        question(q, is_causal=True),
        question(q, scale=0.5),
        question(q, enable_gqa=True),
        fewer,
        ordered,
    ]
    assert len(set(found)) == len(found)
    assert fewer.endswith("any of FLASH_ATTENTION MATH")
    assert ordered.endswith("first of MATH FLASH_ATTENTION")


def test_torchs_own_order_of_kernels_is_no_part_of_a_question() -> None:
    """It depends on the GPU, which is not there when the question is asked again."""
    facts = Facts(torch.bfloat16, (1, 1, 8, 8), (64, 64, 8, 1), grad=False)
    kernels = ("MATH", "FLASH_ATTENTION")
    switches = (0.0, False, None, False)
    one = Question((facts, facts, facts, None), *switches, kernels)
    other = Question((facts, facts, facts, None), *switches, kernels[::-1])
    assert str(one) == str(other)
    assert str(one) != str(dataclasses.replace(one, chosen=True))


def test_what_nobody_answers_is_refused_with_its_line() -> None:
    """Dynamo's own error is put into words."""
    with attention_names.answering({}, [], "cpu"), pytest.raises(Exception) as caught:
        stepped(Attention(), torch.randn(2, 16, 64), None)
    said = words_of(caught.value)
    assert said.startswith(f"{ATTENTION}, at ")
    assert "compilecache gpu-profile --plan" in said
    number = int(said.partition("test_answers.py:")[2].partition(" in forward")[0])
    assert Path(__file__).read_text().splitlines()[number - 1].endswith("# asks")


def test_where_plain_operations_alone_are_allowed_nobody_is_asked() -> None:
    """Nor about tensors of another device."""
    model, x = Attention(), torch.randn(2, 16, 64)
    with sdpa_kernel(SDPBackend.MATH):
        before = stepped(model, x, None)
        torch._dynamo.reset()
        with attention_names.answering({}, [], "cpu"):
            assert torch.equal(stepped(model, x, None)[0], before[0])
    torch._dynamo.reset()
    with attention_names.answering({}, [], "cuda"):
        stepped(model, x, None)


# -- what was written down ------------------------------------------------------------------------

QUERY = {"tensor": "query"}
WRONG: dict[str, dict[str, Any]] = {
    "operation": {"operations": [{"name": "aten.no_such_thing.default", "arguments": []}]},
    "overload": {"operations": [{"name": "aten.sin.no_such", "arguments": [QUERY]}]},
    "input": {"operations": [{"name": "aten.sin.default", "arguments": [{"tensor": "bias"}]}]},
    "result": {"operations": [{"name": "aten.sin.default", "arguments": [{"tensor": 3}]}]},
    "reference": {"operations": [{"name": "aten.sin.default", "arguments": [{"tensor": [1]}]}]},
    "value": {"operations": [{"name": "aten.sin.default", "arguments": [{"number": "many"}]}]},
    "kind": {"operations": [{"name": "aten.sin.default", "arguments": [{"what": 1}]}]},
    "type": {"operations": [{"name": "aten.sum.dim_IntList", "arguments": [QUERY, [0]],
                             "named": {"dtype": {"torch": "float33"}}}]},
    "function": {"operations": [{"name": "aten.sin.default", "arguments": [{"torch": "load"}]}]},
    "arguments": {"operations": [{"name": "aten.sin.default", "arguments": [QUERY, 1, 2]}]},
    "sizes": {"operations": [{"name": "aten.view.default", "arguments": [QUERY, [7]]}]},
    "output": {"operations": [{"name": "aten.sin.default", "arguments": [QUERY]}], "output": 1},
    "item": {"operations": [{"name": "aten.sin.default", "arguments": [QUERY]}],
             "output": {"tensor": 0, "item": "first"}},
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_does_not_fit_this_torch_is_refused(case: str) -> None:
    """Whatever does not: nothing else is computed instead."""
    answer = Answer.model_validate({"output": {"tensor": 0}, **WRONG[case]})
    with pytest.raises(ValueError, match=r"\S"):
        carry_out(answer, {"query": torch.randn(2, 3)})
    model, x = Attention(), torch.randn(2, 16, 64)
    known = {str(question): answer for question in asked(model, x, None)}
    with attention_names.answering(known, [], "cpu"), pytest.raises(Exception) as caught:
        stepped(model, x, None)
    said = words_of(caught.value)
    assert said.startswith(f"{ATTENTION}, at ")
    assert "the profile's answer does not fit this torch; record it anew" in said


BAD = [
    ({"q": {"operations": [], "output": QUERY}}, "attention.q.operations"),
    ({"q": {"operations": [{"name": "os.system", "arguments": ["ls"]}], "output": QUERY}}, "name"),
    ({"q": {"operations": [{"name": "aten.sin.default", "arguments": [], "more": 1}]}}, "more"),
    ({"q": []}, "attention.q"),
]


@pytest.mark.parametrize(("attention", "field"), BAD, ids=lambda value: str(value)[:40])
def test_a_profile_with_a_bad_answer_is_refused_by_its_field(
    attention: dict[str, object], field: str
) -> None:
    """Before anything is compiled."""
    data = {**H200.model_dump(mode="json"), "attention": attention}
    with pytest.raises(PlanError, match=field):
        GpuProfile.parse(data)
    with pytest.raises(PlanError, match="padding"):
        GpuProfile.parse({**H200.model_dump(mode="json"), "padding": {"key": "yes"}})


def test_an_output_that_is_its_own_input_is_not_written_down() -> None:
    """Nothing would be called for it."""
    from compilecache.operations import Recorder

    x = torch.randn(2)
    with Recorder({"query": x}) as recorder:
        y = x.sin()
        z = y[0] * 2
    assert [one.name for one in recorder.leading_to(z).operations] == [
        "aten.sin.default", "aten.select.int", "aten.mul.Tensor"]  # fmt: skip
    for output in (x, torch.ones(2)):
        with pytest.raises(ValueError, match="none of an operation"):
            recorder.leading_to(output)
    with Recorder({"query": x}), pytest.raises(ValueError, match="tensor of its own"):
        x + y


# -- padding --------------------------------------------------------------------------------------


class Match:
    """As the pattern matcher gives it: the line of a product."""

    def output_node(self) -> torch.fx.Node:
        """One that was traced nowhere."""
        return torch.fx.Graph().placeholder("mm")


def test_padding_is_noted_by_torchs_key_and_given_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is an answer torch does not look any further; without one it would time, and is refused."""
    from torch._inductor.fx_passes import pad_mm

    def decide(match: object, one: torch.Tensor, other: torch.Tensor, op: object) -> bool:
        found = pad_mm.get_cached_should_pad(f"{one.shape}")
        return True if found is None else found

    def key(match: object, one: torch.Tensor, other: torch.Tensor, op: object) -> str:
        return f"key of {list(one.shape)}"

    monkeypatch.setattr(pad_mm, "should_pad", decide)
    monkeypatch.setattr(pad_mm, "should_pad_bench_key", key)
    monkeypatch.setattr(pad_mm, "can_pad", lambda one, other, op: one.shape[0] > 1)
    monkeypatch.setattr(pad_mm, "get_cached_should_pad", lambda key: None)
    large, small, op = torch.ones(3, 3), torch.ones(1, 3), torch.ops.aten.mm
    noted: dict[str, bool] = {}
    with padding_names.noting(noted):
        pad_mm.should_pad(Match(), large, large, op)
        pad_mm.should_pad(Match(), small, large, op)
    assert noted == {"key of [3, 3]": True}
    for answer in (True, False):
        with padding_names.answering({"key of [3, 3]": answer}):
            assert pad_mm.should_pad(Match(), large, large, op) is answer
    with padding_names.answering({}), pytest.raises(Refused, match="gpu-profile --plan"):
        pad_mm.should_pad(Match(), large, large, op)
    assert pad_mm.should_pad is decide


# -- the command ----------------------------------------------------------------------------------


def test_a_plan_is_traced_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Every target of every plan; what both ask is answered once."""
    plans = [plan("attending", "eval"), plan("attending", "eval", rows=32), plan("norm")]
    said = answers_for(plans, "cpu")
    assert len(said.attention) == 4
    assert all(answer.operations for answer in said.attention.values())
    assert said.padding == {}
    assert "asking about forward eval" in capfd.readouterr().err


def test_a_plan_that_cannot_be_traced_is_an_error_that_names_the_target() -> None:
    """Nothing is recorded."""
    with pytest.raises(CompileFailed, match=r"forward train .* cannot be traced as a program"):
        answers_for([plan("breaking")], "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    """And a plan that is not there is told first."""
    missing = CliRunner().invoke(gpu_profile, ["--plan", str(tmp_path / "plan.yaml")])
    assert isinstance(missing.exception, PlanError)
    assert "plan.yaml" in str(missing.exception)
    (tmp_path / "plan.yaml").write_text(plan("attending").dump())
    refused = CliRunner().invoke(gpu_profile, ["--plan", str(tmp_path / "plan.yaml")])
    assert isinstance(refused.exception, PlanError)
    assert "there is no NVIDIA GPU here" in str(refused.exception)
    output = ["--output", str(tmp_path / "gone" / "gpu.json")]
    unwritable = CliRunner().invoke(gpu_profile, output).exception
    assert "gpu.json' cannot be written: No such file" in str(unwritable)
