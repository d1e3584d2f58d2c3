"""The drafter as a whole, eager: what each slot depends on, and what prepare refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from compilecache.errors import PlanError
from compilecache.workload import HasWorkload
from dflash_model.batch import Batch
from dflash_model.config import DrafterConfig
from dflash_model.model import Drafter, _positions

MakeRows = Callable[..., dict[str, torch.Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def hidden(drafter: Drafter, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return drafter.hidden(
            batch["input_ids"],
            batch["hidden_states"],
            batch["anchors"],
            batch.get("full_mask"),
            batch.get("sliding_mask"),
        )


def test_names_are_those_of_the_published_checkpoints(drafter: Drafter) -> None:
    """A published safetensors file loads without renaming."""
    layer = [
        "input_layernorm.weight",
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{x}.weight" for x in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj")),
        "self_attn.v_proj.weight",
    ]
    expected = [f"layers.{i}.{name}" for i in range(2) for name in layer]
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained == {*expected, "fc.weight", "hidden_norm.weight", "norm.weight"}


def test_target_weights_are_frozen(drafter: Drafter, make_rows: MakeRows) -> None:
    """Embedding and head are the target's: they get no gradient, everything else does."""
    drafter(**drafter.prepare(**make_rows(2, 40))).backward()
    without = {name for name, p in drafter.named_parameters() if p.grad is None}
    assert without == {"embed_tokens.weight", "lm_head.weight"}


def test_initial_weights_are_normal_with_the_published_spread(small: DrafterConfig) -> None:
    """Matrices start as normal(0, 0.02), norms as ones."""
    made = Drafter.random(replace(small, hidden_size=256), torch.device("cpu"))
    assert made.fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert (made.norm.weight == 1).all()


def test_random_weights_leave_the_global_generator_alone(small: DrafterConfig) -> None:
    """The same seed gives the same drafter, whatever the process drew before."""
    before = torch.random.get_rng_state()
    first, second = (Drafter.random(small, torch.device("cpu"), seed=4) for _ in range(2))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_positions_continue_from_the_anchor() -> None:
    """Context t is at t, slot k of anchor a at a + k."""
    assert _positions(torch.tensor([[1, 3]]), 5, 3).tolist() == [[0, 1, 2, 3, 4, 1, 2, 3, 3, 4, 5]]


def test_block_holds_the_anchor_token_then_masks(drafter: Drafter) -> None:
    """Only slot 0 of a block knows a token of the row."""
    tokens = torch.arange(10).unsqueeze(0)
    ids = drafter._block_ids(tokens, torch.tensor([[3, 7]]))
    assert ids.tolist() == [[3, 63, 63, 63, 7, 63, 63, 63]]


def test_blocks_do_not_leak_into_each_other(drafter: Drafter, make_rows: MakeRows) -> None:
    """Changing one block's anchor token changes that block and no other."""
    batch = drafter.prepare(**make_rows(1, 40))
    before = hidden(drafter, batch)
    at = batch["anchors"][0, 2]
    batch["input_ids"][0, at] = (batch["input_ids"][0, at] + 1) % 60
    changed = (hidden(drafter, batch) != before).flatten(2).any(-1)
    assert changed.tolist() == [[False, False, True, False, False, False]]


def test_blocks_see_the_target_only_before_their_anchor(
    full_only: DrafterConfig, make_rows: MakeRows
) -> None:
    """What the target computed at the anchor or later does not reach the block; just before, it does."""
    drafter = Drafter.random(full_only, torch.device("cpu"), anchors=6)
    batch = drafter.prepare(**make_rows(1, 40))
    before, at = hidden(drafter, batch), int(batch["anchors"][0, 3])
    for moved, expected in ((at, False), (at - 1, True)):
        changed = batch.copy()
        changed["hidden_states"] = batch["hidden_states"].clone()
        changed["hidden_states"][0, moved] += 1.0
        difference = hidden(drafter, changed) != before
        assert difference[0, 3].any().item() is expected


def test_neighbouring_slots_read_both_ways_in_full_layers(
    full_only: DrafterConfig, make_rows: MakeRows
) -> None:
    """Full layers are not causal inside a block, sliding ones are."""
    drafter = Drafter.random(full_only, torch.device("cpu"), anchors=6)
    mask = drafter.prepare(**make_rows(1, 40))["full_mask"]
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0, 0, 40 : 40 + full_only.block_size].all()


def test_dense_and_flex_give_the_same_loss(drafter: Drafter, make_rows: MakeRows) -> None:
    """Training on a CPU and evaluating on it agree, for sliding and full layers."""
    rows = make_rows(2, 41)

    def prepare() -> Batch:
        return drafter.prepare(**rows, generator=torch.Generator().manual_seed(1))

    dense = prepare()
    with torch.no_grad():
        flex = prepare()
        assert isinstance(dense["full_mask"], torch.Tensor)
        assert isinstance(flex["sliding_mask"], BlockMask)
        torch.testing.assert_close(drafter(**dense), drafter(**flex))


def test_packed_rows_are_trained_as_if_apart(full_only: DrafterConfig, make_rows: MakeRows) -> None:
    """A block of the second document has the hidden states it has when that document is alone."""
    packed = Drafter.random(full_only, torch.device("cpu"), anchors=40, packed=True)
    rows = make_rows(1, 40)
    rows["loss_mask"][:] = True
    documents = (torch.arange(40) >= 20).long().unsqueeze(0)
    together = hidden(packed, packed.prepare(**rows, document_ids=documents))
    alone = Drafter.random(full_only, torch.device("cpu"), anchors=19)
    second = {name: value[:, 20:] for name, value in rows.items()}
    apart = hidden(alone, alone.prepare(**second))
    torch.testing.assert_close(together[:, 20:39], apart, rtol=1e-4, atol=1e-5)


def test_row_without_anchors_gives_no_nan(drafter: Drafter, make_rows: MakeRows) -> None:
    """A row that teaches nothing, alone in its batch, gives zero loss and finite gradients."""
    rows = make_rows(1, 40)
    rows["loss_mask"][:] = False
    loss = drafter(**drafter.prepare(**rows))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)


def test_draft_gives_logits_of_the_slots_to_predict(drafter: Drafter, make_rows: MakeRows) -> None:
    """The clean anchor is not predicted; every other slot has one row of logits."""
    with torch.no_grad():
        logits = drafter.draft(drafter.prepare(**make_rows(2, 30)))
    assert logits.shape == (2, 6, 3, 64)


def test_prepare_gives_one_kind_of_tensor_whatever_came(
    drafter: Drafter, make_rows: MakeRows
) -> None:
    """Strides and dtypes of the rows do not reach the graph, where each would be a new shape."""
    rows = make_rows(2, 40)
    batch = drafter.prepare(
        rows["input_ids"].int().T.contiguous().T,
        rows["hidden_states"].double().transpose(0, 1).contiguous().transpose(0, 1),
        rows["loss_mask"].float(),
    )
    assert batch["input_ids"].dtype == torch.int64
    assert batch["hidden_states"].dtype == torch.float32
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["hidden_states"].is_contiguous() and batch["input_ids"].is_contiguous()


@pytest.mark.parametrize("name", ["hidden_states", "loss_mask"])
def test_input_of_another_length_is_named(drafter: Drafter, make_rows: MakeRows, name: str) -> None:
    """Tokens padded to one length and something else to another is refused (speculators#196)."""
    rows = make_rows(2, 40)
    rows[name] = rows[name][:, :-1]
    with pytest.raises(PlanError, match=f"input '{name}' is") as caught:
        drafter.prepare(**rows)
    assert caught.value.field == name


def test_documents_are_refused_or_demanded(
    drafter: Drafter, small: DrafterConfig, make_rows: MakeRows
) -> None:
    """Whether rows are packed is part of the graph, so it cannot change from step to step."""
    packed = Drafter.random(small, torch.device("cpu"), anchors=6, packed=True)
    with pytest.raises(PlanError, match="'document_ids' is missing"):
        packed.prepare(**make_rows(2, 40))
    with pytest.raises(PlanError, match="'document_ids' is given to a drafter made for unpacked"):
        drafter.prepare(**make_rows(2, 40), document_ids=torch.zeros(2, 40, dtype=torch.long))


def test_flex_training_on_a_cpu_is_refused_before_it_runs(
    small: DrafterConfig, make_rows: MakeRows
) -> None:
    """Flex has no backward on a CPU, and that is said at once (pytorch#148752)."""
    drafter = Drafter.random(small, torch.device("cpu"), anchors=6, attention="flex")
    with pytest.raises(PlanError, match="no backward on a CPU") as caught:
        drafter.prepare(**make_rows(1, 40))
    assert caught.value.field == "attention"


def test_drafter_brings_its_workload(drafter: Drafter) -> None:
    """The workload of a drafter has its sizes, anchors and dtype."""
    assert isinstance(drafter, HasWorkload)
    workload = drafter.compile_workload()
    assert (workload.drafter_config, workload.anchors) == (drafter.config, 6)
