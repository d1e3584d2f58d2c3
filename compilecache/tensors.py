"""Real tensors for the tensor specs of plain examples.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from compilecache.errors import PlanError
from compilecache.shapes import TensorSpec

if TYPE_CHECKING:
    import torch

SEED = 0
"""Of the generator that fills floating inputs; the global one is never touched."""


class Maker:
    """Makes the tensors of one step, from one generator."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._generator = torch.Generator("cpu" if device.type == "meta" else device)
        self._generator.manual_seed(SEED)

    def tensor(self, name: str, spec: TensorSpec, given: object) -> torch.Tensor:
        """A new tensor for an argument of that name, with the values of ``given`` where it has any."""
        import torch

        dtype = dtype_named(spec.dtype, f"argument '{name}'")
        stride = contiguous(spec.shape) if spec.stride is None else spec.stride
        with torch.no_grad():
            made = torch.empty_strided(spec.shape, stride, dtype=dtype, device=self._device)
            # Over the storage, not the tensor: an expanded tensor cannot be written to.
            storage = made.as_strided((_extent(spec.shape, stride),), (1,))
            if isinstance(given, torch.Tensor) and _holds_data(given):
                storage.copy_(given.as_strided(storage.shape, (1,), given.storage_offset()))
            else:
                self._fill(storage, name)
        return made.requires_grad_(spec.requires_grad)

    def _fill(self, storage: torch.Tensor, name: str) -> None:
        import torch

        if storage.is_meta:
            return
        if storage.is_floating_point() or storage.is_complex():
            # The 8-bit floats have no normal_ of their own.
            wide = torch.float32 if storage.dtype.itemsize == 1 else storage.dtype
            noise = torch.empty(storage.shape, dtype=wide, device=self._device)
            storage.copy_(noise.normal_(generator=self._generator))
        else:
            storage.fill_(storage.dtype is torch.bool or name.endswith("mask"))


def _holds_data(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of storage that a tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dtype_named(name: str, where: str) -> torch.dtype:
    """torch's dtype of that name. Raises PlanError saying where an unknown one stands."""
    import torch

    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
    near = get_close_matches(name, known, n=1)
    raise PlanError(
        f"{where} has an unknown dtype '{name}'",
        next_step=f"Did you mean '{near[0]}'" if near else "Use torch's name, such as bfloat16",
        field="dtype",
    )
