"""The DFlash block-diffusion drafter (arXiv 2602.06036): model, masks, loss, checkpoints, workload.

A drafter proposes ``block_size`` tokens at once for a frozen target model. Training runs it on
hundreds of blocks of one row, so its attention needs a sparse mask and its compiled graphs depend
on many dimensions; :mod:`dflash_model.workload` names every one of them for ``compilecache``.

Importing this package does not import torch; the names that need it are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dflash_model.config import PRESETS, DrafterConfig, preset
from dflash_model.hf_config import from_hf

if TYPE_CHECKING:
    from dflash_model.checkpoint import load_drafter, load_target, save_drafter
    from dflash_model.model import Drafter

__all__ = [
    "PRESETS",
    "Drafter",
    "DrafterConfig",
    "from_hf",
    "load_drafter",
    "load_target",
    "preset",
    "save_drafter",
]

_HOMES = {
    "Drafter": "dflash_model.model",
    "load_drafter": "dflash_model.checkpoint",
    "load_target": "dflash_model.checkpoint",
    "save_drafter": "dflash_model.checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash_model' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
