"""The frozen target model: where the hidden states that a drafter reads come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from compilecache.errors import PlanError
from dflash_model.checkpoint import CheckpointError
from dflash_model.config import DrafterConfig
from dflash_model.handover import sent
from dflash_model.microbatch import MicroBatch


class Target(Protocol):
    """What a target thread runs. Each thread has one of its own."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def hidden(self, batch: MicroBatch) -> Tensor:
        """``[B, S, T·H]``: outputs of the captured layers, side by side, without gradient."""


class HfTarget:
    """A causal language model of Hugging Face transformers, cut after its last captured layer.

    ``hidden`` gives what ``output_hidden_states=True`` gives at index id + 1, without keeping the
    other layers or computing logits; pads are 0. Rows are padded on the right and the model is
    causal, so no position of a row sees a pad and no attention mask is needed.
    """

    def __init__(self, model: nn.Module, config: DrafterConfig) -> None:
        """Raises PlanError when the model has not the layers or the width that the drafter reads."""
        self._decoder = _decoder_of(model)
        layers = _layers_of(self._decoder)
        _check_fit(layers, self._decoder, config)
        last = config.target_layer_ids[-1]
        self._outputs: dict[int, Tensor] = {}
        for layer in config.target_layer_ids:
            # Index L of the hidden states, after the last layer, is the normalised output.
            source = self._decoder.norm if layer + 1 == len(layers) else layers[layer]
            cast(nn.Module, source).register_forward_hook(self._keep(layer))
        self._decoder.layers = layers[: last + 1]
        self._decoder.requires_grad_(False).eval()

    @classmethod
    def load(
        cls, folder: str | Path, config: DrafterConfig, device: torch.device | None = None
    ) -> HfTarget:
        """The model of a local folder, in the dtype it was saved in. Nothing is downloaded.

        Raises CheckpointError when the folder holds no model that transformers can load, PlanError
        when transformers is missing or the model does not fit the drafter.
        """
        return cls(_load(Path(folder)).to(device or torch.device("cpu")), config)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self._decoder.parameters()).device

    @torch.no_grad()
    def hidden(self, batch: MicroBatch) -> Tensor:
        """``[B, S, T·H]`` in the target's dtype, 0 on pads."""
        self._decoder(input_ids=sent(batch.input_ids, self.device), use_cache=False)
        hidden = torch.cat([self._outputs.pop(layer) for layer in sorted(self._outputs)], dim=-1)
        pads = sent(~batch.attention_mask, self.device).unsqueeze(-1)
        return hidden.masked_fill_(pads, 0)

    def _keep(self, layer: int) -> Callable[[nn.Module, object, object], None]:
        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            assert isinstance(first, Tensor)
            self._outputs[layer] = first

        return keep


def _load(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"target '{folder}' holds no config.json",
            next_step="Name the folder of a Hugging Face model that lies on this machine",
        )
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise PlanError(
            "a target needs transformers",
            next_step="pip install compilecache[train]",
            field="target",
        ) from error
    cast(Callable[[], None], logging.disable_progress_bar)()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype="auto", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"target '{folder}' cannot be loaded: {first.rstrip('.')}",
            next_step="Name the folder of a causal language model that transformers knows",
        ) from error
    return cast(nn.Module, model)


def _decoder_of(model: nn.Module) -> nn.Module:
    """The stack of layers below the ``lm_head``."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if isinstance(decoder, nn.Module) and {"layers", "norm"} <= set(decoder._modules):
        return decoder
    raise PlanError(
        f"target {type(model).__name__} has no decoder with 'layers' and 'norm'",
        next_step="Use a target built like Llama or Qwen3",
        field="target",
    )


def _layers_of(decoder: nn.Module) -> nn.ModuleList:
    return cast(nn.ModuleList, decoder.layers)


def _check_fit(layers: nn.ModuleList, decoder: nn.Module, config: DrafterConfig) -> None:
    width = next(decoder.parameters()).shape[-1]
    last = config.target_layer_ids[-1]
    faults: Mapping[str, bool] = {
        f"it has {len(layers)} layers, but layer {last} is captured": last >= len(layers),
        f"its hidden size is {width}, the drafter's {config.hidden_size}": width
        != config.hidden_size,
    }
    found = [fault for fault, holds in faults.items() if holds]
    if found:
        raise PlanError(
            f"the target does not fit the drafter: {'; '.join(found)}",
            next_step="Use the target that the drafter's config is made for",
            field="target",
        )
