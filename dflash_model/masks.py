"""Which keys a query may see: ``mask_mod`` closures, references for them, and their BlockMask.

Keys are the context 0..S-1, then the N blocks of b slots; queries are the blocks alone, Q = N·b.
A query in kept block j, slot k, sees context before its anchor and its own block, nothing else
(arXiv 2602.06036, appendix A.1).

The closures hold their state in cells: Dynamo guards those, but not default arguments
(pytorch/pytorch#178365).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128
"""Side, in positions, of the tiles that a BlockMask skips or visits."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of one batch lie."""

    context: int
    """S, positions."""
    block_size: int
    """b, slots of a block."""
    anchors: Tensor
    """``[B, N] int64``: position of each block's slot 0."""
    keep: Tensor
    """``[B, N] bool``: False for pads."""
    document_ids: Tensor | None = None
    """``[B, S] int64`` for packed rows: a block sees only the document of its anchor."""

    @property
    def q_len(self) -> int:
        """Q = N·b."""
        return self.anchors.shape[1] * self.block_size

    @property
    def kv_len(self) -> int:
        """S + Q."""
        return self.context + self.q_len


def build_mask_mod(layout: BlockLayout, window: int | None = None) -> MaskMod:
    """The closure for ``create_block_mask``: sliding with a window of W tokens, packed with documents."""
    base = _full(layout) if window is None else _sliding(layout, window)
    return base if layout.document_ids is None else _packed(layout, base, layout.document_ids)


def mask_kind(mod: MaskMod) -> str:
    """The kind of a closure of ``build_mask_mod``: "full", "sliding", "packed" or "packed_sliding"."""
    name = mod.__name__
    if name != "packed":
        return name
    base = inspect.getclosurevars(mod).nonlocals["base"].__name__
    return "packed" if base == "full" else f"packed_{base}"


def _full(layout: BlockLayout) -> MaskMod:
    context, block = layout.context, layout.block_size
    anchors, keep = layout.anchors, layout.keep
    count = anchors.shape[1]

    def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Called with queries past Q too, rounded up to a tile (SpecForge#511): clamp, then AND.
        j = q // block
        at = j.clamp(max=count - 1)
        before = (k < context) & (k < anchors[b, at])
        own = (k >= context) & ((k - context) // block == j)
        return (j < count) & keep[b, at] & (before | own)

    return full


def _sliding(layout: BlockLayout, window: int) -> MaskMod:
    context, block = layout.context, layout.block_size
    anchors, keep = layout.anchors, layout.keep
    count = anchors.shape[1]

    def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        j, slot = q // block, q % block
        at = j.clamp(max=count - 1)
        anchor = anchors[b, at]
        before = (k < context) & (k < anchor) & (k >= anchor + slot - (window - 1))
        own = (k >= context) & ((k - context) // block == j) & ((k - context) % block <= slot)
        return (j < count) & keep[b, at] & (before | own)

    return sliding


def _packed(layout: BlockLayout, base: MaskMod, document_ids: Tensor) -> MaskMod:
    context, block, anchors = layout.context, layout.block_size, layout.anchors
    count = anchors.shape[1]

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = (q // block).clamp(max=count - 1)
        mine = document_ids[b, anchors[b, at]]
        same = document_ids[b, k.clamp(max=context - 1)] == mine
        return base(b, h, q, k) & ((k >= context) | same)

    return packed


Tiles = tuple[Tensor, Tensor]
"""Which 128x128 tiles are partly and which are wholly visible, each ``[B, 1, Q/128, KV/128] bool``."""


class BlockMasks(nn.Module):
    """Finds the visible tiles of a mask; a module of its own because it is compiled on its own.

    Eager, this costs gigabytes a step (speculators#731). It has no parameters and needs no
    gradient: call it under ``torch.no_grad`` so that training and evaluation share a graph. What
    ``create_block_mask`` does beyond it, sorting tile indices, stays eager (``block_mask_of``): as
    generated code the sorts of a few dozen columns take ptxas minutes, and running them takes none.
    """

    def forward(
        self, mask_mod: MaskMod, *, batch: int, q_len: int, kv_len: int, device: torch.device
    ) -> Tiles:
        """Tiles of ``[B, 1, Q, S+Q]``, one mask for all heads: one a head runs out of memory."""
        dense = create_mask(mask_mod, batch, None, q_len, kv_len, device=device)
        dense = F.pad(dense, (0, -kv_len % TILE, 0, -q_len % TILE))
        rows, columns = dense.shape[2] // TILE, dense.shape[3] // TILE
        tiled = dense.reshape(batch, 1, rows, TILE, columns, TILE)
        visible = tiled.sum(dim=(3, 5), dtype=torch.int32)
        full = visible == TILE * TILE
        return (visible > 0) & ~full, full


@torch.no_grad()
def block_mask_of(tiles: Tiles, mask_mod: MaskMod, *, q_len: int, kv_len: int) -> BlockMask:
    """The BlockMask that flex attention takes, as ``create_block_mask`` would make it."""
    (partial_counts, partial), (full_counts, full) = map(_ordered, tiles)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial,
        full_counts,
        full,
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles sees, and the columns, those it sees first."""
    seen = tiles.to(torch.int32).contiguous()
    columns = torch.argsort(seen, dim=-1, descending=True, stable=True)
    return seen.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32).contiguous()


def dense_mask(layout: BlockLayout, window: int | None = None) -> Tensor:
    """The same mask as ``[B, 1, Q, S+Q] bool``, for attention without flex; needs no compile."""
    device = layout.anchors.device
    rows = torch.arange(layout.anchors.shape[0], device=device).view(-1, 1, 1)
    queries = torch.arange(layout.q_len, device=device).view(1, -1, 1)
    keys = torch.arange(layout.kv_len, device=device).view(1, 1, -1)
    return build_mask_mod(layout, window)(rows, rows, queries, keys).unsqueeze(1)


def reference_mask(layout: BlockLayout, window: int | None = None) -> Tensor:
    """``[B, 1, Q, S+Q] bool`` from the definition, one element at a time: the tests' reference."""
    rows = range(layout.anchors.shape[0])
    seen = [
        [
            [_sees(layout, window, row, q, k) for k in range(layout.kv_len)]
            for q in range(layout.q_len)
        ]
        for row in rows
    ]
    return torch.tensor(seen, dtype=torch.bool).unsqueeze(1)


def _sees(layout: BlockLayout, window: int | None, row: int, q: int, k: int) -> bool:
    j, slot = divmod(q, layout.block_size)
    anchor = int(layout.anchors[row, j])
    if not layout.keep[row, j]:
        return False
    if k >= layout.context:
        block, other_slot = divmod(k - layout.context, layout.block_size)
        return block == j and (window is None or other_slot <= slot)
    if layout.document_ids is not None:
        documents = layout.document_ids[row]
        if documents[k] != documents[anchor]:
            return False
    return k < anchor and (window is None or k >= anchor + slot - (window - 1))
