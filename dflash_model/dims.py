"""The named dimensions of a drafter's specs, and all that can be wrong with them.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compilecache.errors import PlanError
from compilecache.shapes import InputSpec
from dflash_model.config import DrafterConfig

Fault = tuple[str, str]
"""The field, and the problem with it."""

PHASES = {"forward": ("train", "eval"), "block_mask": ("both",)}
"""The phases that each compiled function has graphs for."""


def packed_kind(kind: str) -> str:
    """The name of a kind of mask over packed rows."""
    return "packed" if kind == "full" else f"packed_{kind}"


def refuse(faults: Iterable[Fault], *, source: str) -> None:
    """Raises one PlanError for all faults, if there are any; its ``field`` is the first one's."""
    found = list(faults)
    if found:
        raise PlanError(
            f"{source}: " + "; ".join(f"'{field}' {problem}" for field, problem in found),
            next_step="Mend the fields named, or write the plan anew with 'compilecache plan'",
            field=found[0][0],
        )


@dataclass(frozen=True, slots=True)
class DrafterDims:
    """What the specs of one drafter must look like."""

    config: DrafterConfig
    """Its sizes; ``dtype`` is the one that the specs carry."""
    anchors: int
    """N, blocks of a row."""
    packed: bool
    """Whether rows hold several documents."""
    flex: bool
    """Whether any step uses flex attention, and so needs ``block_mask``."""

    @property
    def block_masks(self) -> tuple[str, ...]:
        """The kinds of BlockMask that one step needs."""
        kinds = self.config.mask_kinds if self.flex else ()
        return tuple(packed_kind(kind) if self.packed else kind for kind in kinds)

    @property
    def forward_mask(self) -> str:
        """One word for the whole set of masks that ``forward`` takes."""
        kinds = self.config.mask_kinds
        kind = "mixed" if len(kinds) > 1 else kinds[0]
        return packed_kind(kind) if self.packed else kind

    def spec(self, function: str, phase: str, seq_len: int, batch: int, mask: str) -> InputSpec:
        """The spec with this drafter's dtype, anchors and block size."""
        dims = {"seq_len": seq_len, "batch": batch, "anchors": self.anchors}
        return InputSpec.model_validate(
            {
                "function": function,
                "phase": phase,
                "dtype": self.config.dtype,
                "dims": {**dims, "block": self.config.block_size, "mask": mask},
            }
        )

    def request_faults(
        self, seq_lens: Iterable[int], batch_sizes: Iterable[int], phases: Iterable[str]
    ) -> Iterator[Fault]:
        """What keeps lengths, batch sizes and phases from becoming specs."""
        longest = self.config.max_length
        for length in seq_lens:
            if not 1 <= length <= longest:
                yield "seq_len", f"is {length}, not within 1 to {longest}"
        for batch in batch_sizes:
            if batch < 1:
                yield "batch", f"is {batch}, below 1"
        for phase in phases:
            if phase not in PHASES["forward"]:
                yield "phase", f"is '{phase}', not train or eval"

    def faults(self, spec: InputSpec) -> Iterator[Fault]:
        """What keeps a spec from running on this drafter."""
        if spec.function not in PHASES:
            yield "function", f"is '{spec.function}', not forward or block_mask"
            return
        if spec.phase not in PHASES[spec.function]:
            yield "phase", f"is '{spec.phase}', not {' or '.join(PHASES[spec.function])}"
        if spec.dtype != self.config.dtype:
            yield "dtype", f"is {spec.dtype}, but the weights are {self.config.dtype}"
        if spec.example is not None:
            yield "example", "is given, but a drafter has named dims"
        yield from self._dim_faults(spec)

    def _dim_faults(self, spec: InputSpec) -> Iterator[Fault]:
        masks = (self.forward_mask,) if spec.function == "forward" else self.block_masks
        expected = {"anchors": self.anchors, "block": self.config.block_size}
        for name in ("seq_len", "batch", *expected, "mask"):
            if name not in spec.dims:
                yield name, "is missing"
        for name, value in spec.dims.items():
            if name == "mask":
                if value not in masks:
                    yield name, f"is '{value}', not {' or '.join(masks) or 'used without flex'}"
            elif name not in ("seq_len", "batch", *expected, "mask_q_len", "mask_kv_len"):
                yield name, "is no dim of a drafter"
            elif not isinstance(value, int):
                yield name, f"is '{value}', not a number"
            elif name in expected and value != expected[name]:
                yield name, f"is {value}, but the drafter has {expected[name]}"
            else:
                yield from self._size_faults(name, value, spec)

    def _size_faults(self, name: str, value: int, spec: InputSpec) -> Iterator[Fault]:
        """A mask padded apart from its queries or keys is found here (speculators#196)."""
        q_len = self.anchors * self.config.block_size
        if name == "seq_len":
            yield from self.request_faults([value], [], [])
        elif name == "batch":
            yield from self.request_faults([], [value], [])
        elif name == "mask_q_len" and value != q_len:
            yield name, f"is {value}, but there are {q_len} queries"
        elif name == "mask_kv_len" and value != (keys := self._length(spec) + q_len):
            yield name, f"is {value}, but there are {keys} keys"

    @staticmethod
    def _length(spec: InputSpec) -> int:
        length = spec.dims.get("seq_len")
        return length if isinstance(length, int) else 0
