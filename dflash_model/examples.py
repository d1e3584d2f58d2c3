"""Inputs of one step that look like training data, and the dims that given inputs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from compilecache.shapes import InputSpec
from dflash_model.anchors import sample_anchors
from dflash_model.batch import Rows, block_mask_inputs
from dflash_model.dims import packed_kind
from dflash_model.masks import BlockLayout, mask_kind
from dflash_model.model import Drafter

_LOSS_SHARE = 0.8
_PAD_SHARE = 16
_DOCUMENTS = 4


def forward_example(
    spec: InputSpec, drafter: Drafter, device: torch.device
) -> Mapping[str, object]:
    """The keyword arguments of ``Drafter.forward``, random but the same for the same spec.

    Its BlockMasks are made eagerly, so that warming ``forward`` compiles nothing else.
    """
    draw = _Draw(spec, device)
    config, packed = drafter.config, drafter.packed
    rows = Rows(
        draw.tokens(config.vocab_size),
        draw.hidden_states(config.context_size, drafter.fc.weight.dtype),
        draw.loss_mask(),
        draw.document_ids() if packed else None,
    )
    with torch.set_grad_enabled(spec.phase == "train"):
        batch = drafter.batch_of(rows, drafter.block_masks.forward, draw.generator)
    return cast(Mapping[str, object], batch)


def block_mask_example(
    spec: InputSpec, drafter: Drafter, device: torch.device
) -> Mapping[str, object]:
    """The keyword arguments of ``BlockMasks.forward``, random but the same for the same spec."""
    draw = _Draw(spec, device)
    anchors, keep = sample_anchors(draw.loss_mask(), drafter.anchors, generator=draw.generator)
    documents = draw.document_ids() if drafter.packed else None
    layout = BlockLayout(spec.size("seq_len"), drafter.config.block_size, anchors, keep, documents)
    sliding = str(spec.dims["mask"]).endswith("sliding")
    window = drafter.config.sliding_window if sliding else None
    return cast(Mapping[str, object], block_mask_inputs(layout, window))


class _Draw:
    """Random right-padded rows of a spec's size; the global generators stay untouched."""

    def __init__(self, spec: InputSpec, device: torch.device) -> None:
        self.shape = (spec.size("batch"), spec.size("seq_len"))
        self.generator = torch.Generator(device).manual_seed(int(spec.digest, 16))

    def tokens(self, vocab_size: int) -> Tensor:
        return torch.randint(
            vocab_size, self.shape, generator=self.generator, device=self.generator.device
        )

    def hidden_states(self, size: int, dtype: torch.dtype) -> Tensor:
        shape = (*self.shape, size)
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device, dtype=dtype)

    def loss_mask(self) -> Tensor:
        """Loss on most positions, none on the pads at the end."""
        learned = self._uniform() < _LOSS_SHARE
        length = self.shape[1]
        learned[:, length - length // _PAD_SHARE :] = False
        return learned

    def document_ids(self) -> Tensor:
        """A few documents a row, their ids ascending."""
        return (self._uniform() < _DOCUMENTS / self.shape[1]).long().cumsum(1)

    def _uniform(self) -> Tensor:
        return torch.rand(self.shape, generator=self.generator, device=self.generator.device)


def forward_dims(inputs: Mapping[str, object], block_size: int) -> Mapping[str, int | str] | None:
    """The dims of a call of ``Drafter.forward``; None when tensors are missing."""
    tokens, anchors = inputs.get("input_ids"), inputs.get("anchors")
    if not isinstance(tokens, Tensor) or not isinstance(anchors, Tensor):
        return None
    kinds = [kind for kind in ("full", "sliding") if inputs.get(f"{kind}_mask") is not None]
    kind = "mixed" if len(kinds) == 2 else "".join(kinds)
    packed = inputs.get("document_ids") is not None
    return {
        "seq_len": tokens.shape[1],
        "batch": tokens.shape[0],
        "anchors": anchors.shape[1],
        "block": block_size,
        "mask": packed_kind(kind) if packed else kind,
    }


def block_mask_dims(
    inputs: Mapping[str, object], block_size: int
) -> Mapping[str, int | str] | None:
    """The dims of a call of ``BlockMasks.forward``; None when arguments are missing."""
    batch, q_len, kv_len = (inputs.get(name) for name in ("batch", "q_len", "kv_len"))
    mod = inputs.get("mask_mod")
    if not (isinstance(batch, int) and isinstance(q_len, int) and isinstance(kv_len, int)):
        return None
    if not callable(mod):
        return None
    return {
        "seq_len": kv_len - q_len,
        "batch": batch,
        "anchors": q_len // block_size,
        "block": block_size,
        "mask": mask_kind(mod),
    }
