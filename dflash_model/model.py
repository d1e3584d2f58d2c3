"""The drafter: one full graph from captured hidden states to the loss, and what prepares its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_model.batch import Attend, Batch, FindTiles, Mask, Rows, make_batch, takes_dense
from dflash_model.config import DrafterConfig, LayerKind
from dflash_model.layers import Layer, RMSNorm, rotation
from dflash_model.loss import block_targets, weighted_loss
from dflash_model.masks import BlockMasks

if TYPE_CHECKING:
    from dflash_model.workload import DFlashWorkload

DEFAULT_ANCHORS = 512


class Drafter(nn.Module):
    """A DFlash drafter with the frozen ``embed_tokens`` and ``lm_head`` of its target.

    ``anchors`` is N, the blocks drawn from every row. ``attention`` "auto" takes flex attention
    except for training on a CPU, where flex has no backward (pytorch/pytorch#148752). ``packed``
    rows hold several documents and need ``document_ids``.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        anchors: int = DEFAULT_ANCHORS,
        attention: Attend = "auto",
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.anchors = anchors
        self.attention = attention
        self.packed = packed
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden).requires_grad_(False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False).requires_grad_(False)
        self.fc = nn.Linear(config.context_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_kinds)
        self.norm = RMSNorm(hidden, eps)
        self.block_masks = BlockMasks()

    @classmethod
    def random(
        cls,
        config: DrafterConfig,
        device: torch.device,
        *,
        seed: int = 0,
        anchors: int = DEFAULT_ANCHORS,
        attention: Attend = "auto",
        packed: bool = False,
    ) -> Drafter:
        """A drafter of random weights in ``config.dtype``; the global generators stay untouched."""
        with torch.device("meta"):
            drafter = cls(config, anchors=anchors, attention=attention, packed=packed)
        drafter.to(getattr(torch, config.dtype)).to_empty(device=device)
        drafter.initialize(torch.Generator(device).manual_seed(seed))
        return drafter

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draws every matrix from normal(0, 0.02) and sets every norm to 1."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        loss_mask: Tensor,
        anchors: Tensor,
        keep: Tensor,
        document_ids: Tensor | None = None,
        full_mask: Mask | None = None,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """The weighted loss, a float32 scalar.

        ``input_ids``, ``loss_mask`` and ``document_ids`` are ``[B, S]``, ``hidden_states``
        ``[B, S, T·H]``, ``anchors`` and ``keep`` ``[B, N]``; one mask for each kind of layer.
        """
        hidden = self.hidden(input_ids, hidden_states, anchors, full_mask, sliding_mask)
        labels, weights = block_targets(
            input_ids, loss_mask, anchors, keep, self.config.block_size, document_ids
        )
        return weighted_loss(hidden[:, :, 1:], self.lm_head.weight, labels, weights)

    def hidden(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        anchors: Tensor,
        full_mask: Mask | None = None,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Normalised hidden states of every slot, ``[B, N, b, H]``."""
        config = self.config
        context = self.hidden_norm(self.fc(hidden_states))
        blocks = self.embed_tokens(self._block_ids(input_ids, anchors))
        by_kind: dict[LayerKind, Mask | None] = {"full": full_mask, "sliding": sliding_mask}
        places = _positions(anchors, input_ids.shape[1], config.block_size)
        cos, sin = rotation(places, config.head_dim, config.rope_theta, blocks.dtype)
        own = slice(input_ids.shape[1], None)
        for kind, layer in zip(config.layer_kinds, self.layers, strict=True):
            mask = by_kind[kind]
            blocks = layer(blocks, context, (cos[:, :, own], sin[:, :, own]), (cos, sin), mask)
        out: Tensor = self.norm(blocks)
        return out.view(*anchors.shape, config.block_size, -1)

    def draft(self, batch: Batch) -> Tensor:
        """Logits of the slots to predict, ``[B, N, b-1, V]``; all of them at once, so for few blocks."""
        hidden = self.hidden(
            batch["input_ids"],
            batch["hidden_states"],
            batch["anchors"],
            batch.get("full_mask"),
            batch.get("sliding_mask"),
        )
        return F.linear(hidden[:, :, 1:], self.lm_head.weight)

    def prepare(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        loss_mask: Tensor,
        *,
        generator: torch.Generator | None = None,
        document_ids: Tensor | None = None,
    ) -> Batch:
        """Draws anchors and builds the masks of one step: ``model(**model.prepare(...))``.

        Shapes as in ``forward``. Call it in the grad mode of the step: on a CPU the kind of mask
        depends on it. Raises PlanError naming the input whose shape disagrees with the others.
        """
        rows = Rows(input_ids, hidden_states, loss_mask, document_ids)
        return self.batch_of(rows, self.block_masks, generator)

    def batch_of(
        self, rows: Rows, find_tiles: FindTiles, generator: torch.Generator | None
    ) -> Batch:
        """``prepare`` with another finder of tiles, such as one that is not compiled."""
        rows.check(self.config, packed=self.packed)
        return make_batch(
            rows,
            self.config,
            anchors=self.anchors,
            dtype=self.fc.weight.dtype,
            dense=takes_dense(self.attention, rows.input_ids.device),
            find_tiles=find_tiles,
            generator=generator,
        )

    def compile_workload(self) -> DFlashWorkload:
        """How to warm this very drafter."""
        from dflash_model.workload import DFlashWorkload

        return DFlashWorkload(
            self.config,
            anchors=self.anchors,
            attention=self.attention,
            dtype=str(self.fc.weight.dtype).removeprefix("torch."),
            packed=self.packed,
        )

    def _block_ids(self, input_ids: Tensor, anchors: Tensor) -> Tensor:
        """``[anchor token, MASK × (b-1)]`` of every block, ``[B, Q] int64``."""
        first = input_ids.gather(1, anchors).unsqueeze(-1)
        return F.pad(
            first, (0, self.config.block_size - 1), value=self.config.mask_token_id
        ).flatten(1)


def _positions(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """RoPE positions ``[B, S+Q]``: t for context t, a + k for slot k of anchor a."""
    context = torch.arange(length, device=anchors.device).expand(anchors.shape[0], -1)
    slots = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    return torch.cat([context, slots.flatten(1)], dim=1)
