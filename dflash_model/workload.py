"""How ``compilecache`` plans, feeds and steps a drafter: named as ``dflash_model.workload:dflash``.

Two functions are compiled apart. ``forward`` is the whole step, from hidden states to the loss.
``block_mask`` finds the tiles of a BlockMask, for training and evaluation alike (phase "both"); on a
CPU, where training takes a dense mask that needs no compile, it serves evaluation only. So one
plan is good for every kind of device.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Literal, cast

from pydantic import JsonValue

from compilecache.errors import PlanError
from compilecache.shapes import InputSpec
from compilecache.workload import Workload
from dflash_model import config as configs
from dflash_model.config import DrafterConfig
from dflash_model.dims import DrafterDims, Fault, refuse
from dflash_model.hf_config import from_hf

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dflash_model.model import Drafter

_SOURCES = ("anchors", "batch", "layers", "loss", "masks", "model")
_DTYPES = ("bfloat16", "float16", "float32")
_ATTENTIONS = ("auto", "flex", "dense")
_ANCHORS = 512
_TINY_ANCHORS = 8


class DFlashWorkload(Workload):
    """The workload of one drafter; its settings are those of ``Drafter``.

    Dims of a spec: ``seq_len`` (S), ``batch`` (B), ``anchors`` (N), ``block`` (b) and ``mask``.
    ``forward`` takes all masks of the drafter as one kind ("full", "sliding", "mixed"; with packed
    rows "packed", "packed_sliding", "packed_mixed"), ``block_mask`` is for one of them. A spec may
    also state ``mask_q_len`` and ``mask_kv_len``, which must then be N·b and S + N·b.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        anchors: int = _ANCHORS,
        attention: Literal["auto", "flex", "dense"] = "auto",
        dtype: str | None = None,
        packed: bool = False,
    ) -> None:
        self.drafter_config = replace(config, dtype=dtype or config.dtype)
        self.anchors = anchors
        self.attention = attention
        self.packed = packed
        refuse(self._setting_faults(), source="drafter settings")
        self._dims = DrafterDims(self.drafter_config, anchors, packed, flex=attention != "dense")

    def config(self) -> Mapping[str, JsonValue]:
        """The drafter's sizes, and the settings that change what is traced."""
        sizes = cast(dict[str, JsonValue], asdict(self.drafter_config))
        return sizes | {
            "layer_kinds": list(self.drafter_config.layer_kinds),
            "target_layer_ids": list(self.drafter_config.target_layer_ids),
            "anchors": self.anchors,
            "attention": self.attention,
            "packed": self.packed,
        }

    def origin(self) -> tuple[str, Mapping[str, JsonValue]] | None:
        """Named by its preset; None for a drafter that is like none of them."""
        for name, sizes in configs.PRESETS.items():
            if replace(sizes, dtype=self.drafter_config.dtype) == self.drafter_config:
                settings: dict[str, JsonValue] = {"preset": name, "anchors": self.anchors}
                settings |= {"attention": self.attention, "dtype": self.drafter_config.dtype}
                return "dflash_model.workload:dflash", settings | {"packed": self.packed}
        return None

    def max_length(self) -> int:
        """S at most, in tokens."""
        return self.drafter_config.max_length

    def sources(self) -> Sequence[str]:
        """The modules that are traced, and those that decide what the inputs look like."""
        return tuple(f"dflash_model.{name}" for name in _SOURCES)

    def specs(
        self, seq_lens: Sequence[int], *, batch_sizes: Sequence[int], phases: Sequence[str]
    ) -> Sequence[InputSpec]:
        """For each length and batch size its block masks, then one forward for each phase."""
        dims = self._dims
        refuse(dims.request_faults(seq_lens, batch_sizes, phases), source="drafter specs")
        specs = []
        for length in seq_lens:
            for batch in batch_sizes:
                specs += [
                    dims.spec("block_mask", "both", length, batch, kind)
                    for kind in dims.block_masks
                ]
                specs += [
                    dims.spec("forward", phase, length, batch, dims.forward_mask)
                    for phase in phases
                ]
        return tuple(specs)

    def check(self, spec: InputSpec) -> None:
        """Raises PlanError naming every field that this drafter cannot run."""
        refuse(self._dims.faults(spec), source=f"spec '{spec}'")

    def build(self, device: torch.device) -> Drafter:
        """A drafter of random weights."""
        from dflash_model.model import Drafter

        return Drafter.random(
            self.drafter_config,
            device,
            anchors=self.anchors,
            attention=self.attention,
            packed=self.packed,
        )

    def functions(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """``forward`` is the drafter itself, ``block_mask`` what finds its tiles."""
        return {"forward": module, "block_mask": self._own(module).block_masks}

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        """Random rows of the spec's size, the same for the same spec; compiles nothing.

        Raises PlanError when flex attention is demanded for training on a CPU.
        """
        from dflash_model.examples import block_mask_example, forward_example

        make = block_mask_example if spec.function == "block_mask" else forward_example
        return make(spec, self._own(module), device)

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        """One call; in phase train the loss runs backward. Returns the loss of ``forward``."""
        import torch

        function = self.functions(module)[spec.function]
        if spec.function == "block_mask":
            with torch.no_grad():
                function(**inputs)
            return None
        loss: torch.Tensor = function(**inputs)
        if spec.phase == "train":
            torch.autograd.backward(loss)
        return loss.detach()

    def spec_of(self, function: str, inputs: Mapping[str, object], phase: str) -> InputSpec | None:
        """The spec of a call with these keyword arguments; None when they are not a step's."""
        from dflash_model.examples import block_mask_dims, forward_dims

        read = {"forward": forward_dims, "block_mask": block_mask_dims}.get(function)
        dims = None if read is None else read(inputs, self.drafter_config.block_size)
        if dims is None:
            return None
        return InputSpec.model_validate(
            {
                "function": function,
                "phase": "both" if function == "block_mask" else phase,
                "dtype": self.drafter_config.dtype,
                "dims": dims,
            }
        )

    def _own(self, module: nn.Module) -> Drafter:
        """The module as a drafter. Raises PlanError when it is not the one of these settings."""
        from dflash_model.model import Drafter

        if not isinstance(module, Drafter):
            raise PlanError(
                f"the model is a {type(module).__name__}, not a Drafter",
                next_step="Pass the drafter itself, without a wrapper",
                field="workload",
            )
        mine = (self.anchors, self.attention, self.packed)
        if (module.anchors, module.attention, module.packed) != mine:
            raise PlanError(
                "the drafter was made with other anchors, attention or packing than its workload",
                next_step="Use the workload that the drafter's compile_workload() gives",
                field="workload",
            )
        return module

    def _setting_faults(self) -> list[Fault]:
        faults = []
        if self.anchors < 1:
            faults.append(("anchors", f"is {self.anchors}, below 1"))
        if self.attention not in _ATTENTIONS:
            faults.append(("attention", f"is '{self.attention}', not {', '.join(_ATTENTIONS)}"))
        if self.drafter_config.dtype not in _DTYPES:
            names = ", ".join(_DTYPES)
            faults.append(("dtype", f"is '{self.drafter_config.dtype}', not {names}"))
        return faults


def dflash(
    preset: str | None = None,
    config: str | None = None,
    anchors: int | None = None,
    attention: Literal["auto", "flex", "dense"] = "auto",
    dtype: str | None = None,
    packed: bool = False,
) -> DFlashWorkload:
    """The workload of a preset, or of the ``config.json`` of a published drafter.

    ``anchors`` is 512 unless given (8 for "tiny"), ``dtype`` the config's. Raises PlanError naming
    the setting that cannot be used.
    """
    if (preset is None) == (config is None):
        raise PlanError(
            "a drafter needs either a preset or a config",
            next_step="Set one of them, for example preset=tiny",
            field="preset",
        )
    if anchors is None:
        anchors = _TINY_ANCHORS if preset == "tiny" else _ANCHORS
    sizes = configs.preset(preset) if preset is not None else from_hf(str(config))
    return DFlashWorkload(sizes, anchors=anchors, attention=attention, dtype=dtype, packed=packed)


tiny = dflash(preset="tiny")
"""The workload of the smallest drafter: for tests and demonstrations."""
