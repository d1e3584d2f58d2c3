"""Which planned spec a call comes closest to, and in what it differs.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from compilecache.shapes import InputSpec, TensorSpec

BY_POSITION = "arguments by position"


@dataclass(frozen=True, slots=True)
class Nearest:
    """The planned spec that needs the least change."""

    spec: InputSpec
    """As planned."""
    differences: tuple[str, ...]
    """In words, "seq_len is 640, planned is 1024"; empty when the call is that spec."""


def nearest(called: InputSpec, planned: Iterable[InputSpec]) -> Nearest | None:
    """The closest spec of the same function; None when the plan has none.

    Close means: few dimensions differ, and those by little; of two at equal distance the one that
    a call can be padded to.
    """
    candidates = [spec for spec in planned if spec.function == called.function]
    if not candidates:
        return None
    spec = min(candidates, key=lambda other: _distance(called, other))
    pairs = _pairs(called, spec)
    return Nearest(spec, tuple(_words(name, mine, theirs) for name, mine, theirs in pairs))


Value = object
Pair = tuple[str, Value, Value]


def _pairs(called: InputSpec, planned: InputSpec) -> list[Pair]:
    """What differs: (name, called, planned)."""
    mine, theirs = _content(called), _content(planned)
    if "both" in (called.phase, planned.phase):
        mine.pop("phase"), theirs.pop("phase")
    names = dict.fromkeys([*mine, *theirs])
    pairs = [(n, mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)]
    # How arguments are passed counts only in some versions of torch; a shape counts in all.
    return [pair for pair in pairs if pair[0] != BY_POSITION] or pairs


def _content(spec: InputSpec) -> dict[str, Value]:
    flat: dict[str, Value] = {"phase": spec.phase, "dtype": spec.dtype, **spec.dims}
    for name, value in (spec.example or {}).items():
        if isinstance(value, TensorSpec):
            flat |= {f"{name}.shape[{dim}]": size for dim, size in enumerate(value.shape)}
            flat |= {f"{name}.dtype": value.dtype, f"{name}.requires_grad": value.requires_grad}
            flat |= {f"{name}.stride": value.stride} if value.stride else {}
        else:
            flat[name] = value
    if spec.positional:
        flat[BY_POSITION] = spec.positional
    return flat


def _distance(called: InputSpec, planned: InputSpec) -> tuple[int, int, float]:
    pairs = _pairs(called, planned)
    gaps = [
        abs(mine - theirs) / max(mine, theirs, 1)
        for _, mine, theirs in pairs
        if isinstance(mine, int) and isinstance(theirs, int)
    ]
    smaller = any(
        isinstance(mine, int) and isinstance(theirs, int) and theirs < mine
        for _, mine, theirs in pairs
    )
    return len(pairs), int(smaller), sum(gaps)


def _words(name: str, mine: Value, theirs: Value) -> str:
    if mine is None:
        return f"{name} is missing, planned is {theirs}"
    if theirs is None:
        return f"{name} is {mine}, which is not planned"
    return f"{name} is {mine}, planned is {theirs}"
