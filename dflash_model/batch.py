"""From padded rows to the inputs of one step: checks, anchors, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from compilecache.errors import PlanError
from dflash_model.anchors import sample_anchors
from dflash_model.config import DrafterConfig
from dflash_model.masks import (
    BlockLayout,
    MaskMod,
    Tiles,
    block_mask_of,
    build_mask_mod,
    dense_mask,
)

Attend = Literal["auto", "flex", "dense"]
Mask = Tensor | BlockMask
FindTiles = Callable[..., Tiles]
"""``BlockMasks.forward``, or the compiled module itself."""


class Batch(TypedDict):
    """The keyword arguments of one step, as ``Drafter.prepare`` makes them."""

    input_ids: Tensor
    hidden_states: Tensor
    loss_mask: Tensor
    anchors: Tensor
    keep: Tensor
    document_ids: NotRequired[Tensor]
    full_mask: NotRequired[Mask]
    sliding_mask: NotRequired[Mask]


class BlockMaskInputs(TypedDict):
    """The keyword arguments of ``BlockMasks.forward``."""

    mask_mod: MaskMod
    batch: int
    q_len: int
    kv_len: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Rows:
    """Right-padded rows of one micro-batch."""

    input_ids: Tensor
    """``[B, S]``."""
    hidden_states: Tensor
    """``[B, S, T·H]``: outputs of the target's captured layers, side by side."""
    loss_mask: Tensor
    """``[B, S]``: where the row has loss; False or 0 on pads."""
    document_ids: Tensor | None = None
    """``[B, S]``: which document each position of a packed row belongs to."""

    def check(self, config: DrafterConfig, *, packed: bool) -> None:
        """Raises PlanError naming the first input whose shape disagrees (speculators#196)."""
        batch, length = self.input_ids.shape
        expected: dict[str, tuple[int, ...]] = {
            "hidden_states": (batch, length, config.context_size),
            "loss_mask": (batch, length),
        }
        if packed:
            expected["document_ids"] = (batch, length)
        elif self.document_ids is not None:
            raise _mismatch("document_ids", "is given to a drafter made for unpacked rows")
        for name, shape in expected.items():
            value: Tensor | None = getattr(self, name)
            if value is None or value.shape != shape:
                found = "missing" if value is None else list(value.shape)
                raise _mismatch(name, f"is {found}, expected {list(shape)}")


def make_batch(
    rows: Rows,
    config: DrafterConfig,
    *,
    anchors: int,
    dtype: torch.dtype,
    dense: bool,
    find_tiles: FindTiles,
    generator: torch.Generator | None = None,
) -> Batch:
    """Draws N anchors a row and builds one mask for each kind of layer, without gradient.

    Everything comes out contiguous and in one dtype, because a stride is part of a graph's shape.
    """
    with torch.no_grad():
        drawn, keep = sample_anchors(rows.loss_mask, anchors, generator=generator)
        batch: Batch = {
            "input_ids": rows.input_ids.long().contiguous(),
            "hidden_states": rows.hidden_states.to(dtype).contiguous(),
            "loss_mask": rows.loss_mask.bool().contiguous(),
            "anchors": drawn,
            "keep": keep,
        }
        if rows.document_ids is not None:
            batch["document_ids"] = rows.document_ids.long().contiguous()
        layout = layout_of(batch, config.block_size)
        make = dense_mask if dense else partial(_block_mask, find_tiles)
        if "full" in config.mask_kinds:
            batch["full_mask"] = make(layout, None)
        if "sliding" in config.mask_kinds:
            batch["sliding_mask"] = make(layout, config.sliding_window)
    return batch


def _block_mask(find_tiles: FindTiles, layout: BlockLayout, window: int | None) -> BlockMask:
    inputs = block_mask_inputs(layout, window)
    tiles = find_tiles(**inputs)
    return block_mask_of(tiles, inputs["mask_mod"], q_len=inputs["q_len"], kv_len=inputs["kv_len"])


def layout_of(batch: Batch, block_size: int) -> BlockLayout:
    """Where the blocks of a batch lie."""
    return BlockLayout(
        context=batch["input_ids"].shape[1],
        block_size=block_size,
        anchors=batch["anchors"],
        keep=batch["keep"],
        document_ids=batch.get("document_ids"),
    )


def takes_dense(attention: Attend, device: torch.device) -> bool:
    """Whether a step in the present grad mode needs a dense mask, because flex cannot run it.

    Raises PlanError before anything runs when flex is demanded for training on a CPU.
    """
    untrainable = device.type == "cpu" and torch.is_grad_enabled()
    if attention == "flex" and untrainable:
        raise PlanError(
            "flex attention has no backward on a CPU",
            next_step="Train on a GPU, or leave attention at 'auto', which takes a dense mask here",
            field="attention",
        )
    return attention == "dense" or untrainable


def block_mask_inputs(layout: BlockLayout, window: int | None) -> BlockMaskInputs:
    """What finds the tiles of a layout; with a window, of its sliding layers."""
    return {
        "mask_mod": build_mask_mod(layout, window),
        "batch": layout.anchors.shape[0],
        "q_len": layout.q_len,
        "kv_len": layout.kv_len,
        "device": layout.anchors.device,
    }


def _mismatch(name: str, problem: str) -> PlanError:
    return PlanError(
        f"input '{name}' {problem}",
        next_step="Pad input_ids, hidden_states and masks of one batch to one length",
        field=name,
    )
