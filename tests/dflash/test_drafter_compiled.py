"""The tiny drafter compiled for real, on a CPU: full graphs, right numbers, no second compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_model.batch import block_mask_inputs
from dflash_model.config import PRESETS
from dflash_model.masks import BlockLayout, BlockMasks
from dflash_model.model import Drafter
from dflash_model.workload import tiny

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_compiler"),
    # Raised inside torch while it traces indices of a mask, and while it loads Inductor.
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def compile_in_place(*modules: torch.nn.Module) -> None:
    for module in modules:
        module.compile(fullgraph=True, dynamic=False)


def rows(length: int) -> dict[str, torch.Tensor]:
    config = PRESETS["tiny"]
    generator = torch.Generator().manual_seed(length)
    return {
        "input_ids": torch.randint(config.vocab_size, (1, length), generator=generator),
        "hidden_states": torch.randn(1, length, config.context_size, generator=generator),
        "loss_mask": torch.rand(1, length, generator=generator) < 0.9,
    }


def test_training_step_is_one_graph_with_the_eager_gradients() -> None:
    """Forward and backward compile as a full graph and agree with eager; the next step compiles nothing."""
    drafter = tiny.build(CPU)
    spec = tiny.specs([128], batch_sizes=[1], phases=["train"])[-1]
    inputs = tiny.make_inputs(spec, drafter, CPU)
    expected = tiny.step(spec, drafter, inputs)
    eager = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    compile_in_place(drafter)
    loss = tiny.step(spec, drafter, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-3, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        drafter(**drafter.prepare(**rows(128))).backward()


def test_evaluation_warmed_with_examples_serves_real_batches() -> None:
    """Masks from the compiled function fit the graph that eagerly made ones warmed, and the loss is right."""
    drafter = tiny.build(CPU)
    compile_in_place(*tiny.functions(drafter).values())
    with torch.no_grad():
        for spec in tiny.specs([128], batch_sizes=[1], phases=["eval"]):
            tiny.step(spec, drafter, tiny.make_inputs(spec, drafter, CPU))
        with torch.compiler.set_stance("fail_on_recompile"):
            batch = drafter.prepare(**rows(128))
            loss = drafter(**batch)
        torch.testing.assert_close(loss, drafter.forward(**batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [3, 8, 9])
@pytest.mark.parametrize("kind", ["full", "sliding", "packed", "packed_sliding"])
def test_compiled_tiles_equal_the_eager_ones(kind: str, count: int) -> None:
    """Fewer queries than a tile, one tile and part of a second: values and strides are equal."""
    generator = torch.Generator().manual_seed(count)
    documents = (torch.arange(150) // 60).expand(2, -1) if "packed" in kind else None
    anchors = torch.randint(148, (2, count), generator=generator).sort().values
    layout = BlockLayout(150, 16, anchors, torch.rand(2, count) < 0.8, documents)
    masks = BlockMasks()
    inputs: Any = block_mask_inputs(layout, 20 if "sliding" in kind else None)
    compile_in_place(masks)
    with torch.no_grad():
        compiled, eager = masks(**inputs), masks.forward(**inputs)
    for mine, theirs in zip(compiled, eager, strict=True):
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)


def test_examples_compile_nothing() -> None:
    """Making the inputs of forward does not touch the compiled maker of BlockMasks."""
    drafter: Drafter = tiny.build(CPU)
    compile_in_place(*tiny.functions(drafter).values())
    with torch.compiler.set_stance("fail_on_recompile"):
        for spec in tiny.specs([128], batch_sizes=[1], phases=["train", "eval"]):
            tiny.make_inputs(spec, drafter, CPU)
