"""What only a GPU can decide, found in graphs that Dynamo really traces; no GPU and no CUDA needed."""

from __future__ import annotations

import inspect
import traceback
from types import SimpleNamespace

import pytest
import torch
from asking import Attention, Checkpointed, Overload, Plain
from torch import nn

from compilecache.undecided import (
    Refused,
    kernel_line,
    node_line,
    refuse_operations,
    refuse_settings,
    user_line,
    words_of,
)


def traced(model: nn.Module) -> torch.fx.GraphModule:
    """The graph of one call."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=keep, fullgraph=True)(torch.ones(1, 2, 8, 4))
    return graphs[0]


def line_of(model: type[nn.Module]) -> str:
    """Where a model asks: the line that ends in ``# asks``."""
    lines, first = inspect.getsourcelines(model)
    number = next(n for n, line in enumerate(lines) if line.rstrip().endswith("# asks"))
    return f"asking.py:{first + number} in "


@pytest.mark.parametrize("model", [Attention, Overload, Checkpointed], ids=lambda m: m.__name__)
def test_attention_that_asks_the_device_is_refused_with_its_line(model: type[nn.Module]) -> None:
    """By either name, and in a graph within the graph: it would silently become the math kernel."""
    with pytest.raises(Refused) as caught:
        refuse_operations(traced(model()))
    assert str(caught.value).startswith("scaled_dot_product_attention, at ")
    assert line_of(model) in str(caught.value)


def test_attention_that_was_answered_is_not_refused() -> None:
    """One answer is for one attention: what torch did not ask about is refused."""
    refuse_operations(traced(Attention()), 1)
    refuse_operations(traced(Checkpointed()), 1)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attend = nn.functional.scaled_dot_product_attention
            return attend(x, x, x) + attend(x, x, x).sin()

    graph = traced(Twice())
    refuse_operations(graph, 2)
    with pytest.raises(Refused):
        refuse_operations(graph, 1)


def test_a_graph_without_such_operations_passes() -> None:
    """Nothing is raised."""
    refuse_operations(traced(Plain()))


SETTINGS = [
    ({"max_autotune": True}, "max_autotune"),
    ({"max_autotune_pointwise": True}, "max_autotune_pointwise"),
    ({"coordinate_descent_tuning": True}, "coordinate_descent_tuning"),
    ({"cpp_wrapper": True}, "cpp_wrapper"),
    ({"freezing": True}, "freezing"),
    ({"triton.cudagraphs": True}, "triton.cudagraphs"),
    ({"triton.multi_kernel": 2}, "triton.multi_kernel"),
]


@pytest.mark.parametrize(("chosen", "name"), SETTINGS, ids=lambda value: str(value))
def test_a_setting_that_times_kernels_is_refused_by_name(
    chosen: dict[str, object], name: str
) -> None:
    """Chosen for this compile, or set in torch's own config."""
    import torch._inductor.config as config

    with pytest.raises(Refused, match=rf"the setting {name} "):
        refuse_settings(chosen, config)
    with (
        config.patch({name: next(iter(chosen.values()))}),
        pytest.raises(Refused, match=rf"the setting {name} "),
    ):
        refuse_settings({}, config)


def test_settings_as_they_come_are_not_refused() -> None:
    """Nor one that is switched off for this compile."""
    import torch._inductor.config as config

    refuse_settings({}, config)
    with config.patch(max_autotune=True):
        refuse_settings({"max_autotune": False}, config)


def test_the_modes_of_torch_compile_are_refused() -> None:
    """As torch itself spells them out."""
    from torch._inductor import list_mode_options

    for mode in ("max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"):
        with pytest.raises(Refused, match="the setting"):
            refuse_settings(list_mode_options(mode, False), SimpleNamespace())


# -- lines --------------------------------------------------------------------------------------


def test_the_line_of_a_kernel_is_that_of_the_operations_it_was_made_of(tmp_path: object) -> None:
    """Found by the comment in the generated code that was being run."""
    graph = traced(Attention())
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    code = f"{tmp_path}/generated.py"
    text = (
        f"# Topologically Sorted Source Nodes: [{node.name}, other], Original ATen: [aten.x]\n"
        "kernel_0 = 1\n"
        "# Topologically Sorted Source Nodes: [other], Original ATen: [aten.y]\n"
        "kernel_1 = 2\n"
        "raise RuntimeError('does not fit')\n"
    )
    with open(code, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
    with pytest.raises(RuntimeError) as caught:
        exec(compile(text, code, "exec"), {})
    assert kernel_line(caught.value, "kernel_0", graph) == node_line(node)
    assert line_of(Attention) in node_line(node)
    assert kernel_line(caught.value, "kernel_1", graph) == "no line of yours"
    assert kernel_line(caught.value, "kernel_2", graph) == "no line of yours"


def test_words_name_the_innermost_line_that_is_not_torchs() -> None:
    """What was refused comes first, however deep it lies."""

    def asks() -> None:
        raise Refused("this needs a GPU, at model.py:1 in forward")

    def wraps() -> None:
        try:
            asks()
        except Refused as error:
            raise ValueError("torch says something else") from error

    with pytest.raises(ValueError) as caught:
        wraps()
    assert words_of(caught.value) == "this needs a GPU, at model.py:1 in forward"
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert words_of(other.value).startswith("RuntimeError: ")
    assert "test_undecided.py:" in words_of(other.value)
    assert user_line(traceback.StackSummary.from_list([])) == "no line of yours"
