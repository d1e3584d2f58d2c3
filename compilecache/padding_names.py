"""Whether a matrix product is faster with padded sizes: torch times it on the GPU while it compiles.

Where the GPU is, what torch finds is noted; where it is not, that is given, and a product of which nothing
is known is refused. ``missing()`` lists the private names that this torch does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from compilecache import undecided
from compilecache.torch_names import absent
from compilecache.undecided import Refused

_PLACES = {
    "torch._inductor.fx_passes.pad_mm": [
        "can_pad",
        "get_cached_should_pad",
        "should_pad",
        "should_pad_bench_key",
    ]
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


@contextmanager
def noting(noted: dict[str, bool]) -> Iterator[None]:
    """What torch finds on the device for each product that it might pad is noted by its own key."""
    from torch._inductor.fx_passes import pad_mm

    decide = pad_mm.should_pad

    def note(*args: Any, **named: Any) -> bool:
        answer = bool(decide(*args, **named))
        if (key := _key(*args, **named)) is not None:
            noted[key] = answer
        return answer

    pad_mm.should_pad = note
    try:
        yield
    finally:
        pad_mm.should_pad = decide


@contextmanager
def answering(answers: Mapping[str, bool]) -> Iterator[None]:
    """These answers stand for the device's; a product without one that torch would time is refused."""
    from torch._inductor.fx_passes import pad_mm

    known, decide = pad_mm.get_cached_should_pad, pad_mm.should_pad

    def cached(key: str) -> bool:
        if (answer := known(key)) is None:
            raise _Asked
        return answer

    def answer(match: Any, *args: Any, **named: Any) -> bool:
        key = _key(match, *args, **named)
        if key is not None and (found := answers.get(key)) is not None:
            return found
        try:
            return bool(decide(match, *args, **named))
        except _Asked:
            node = match.output_node()
            words = f"{undecided.operation(node)}, at {undecided.node_line(node)}"
            raise Refused(f"{words}: {undecided.PADDING}") from None

    pad_mm.get_cached_should_pad, pad_mm.should_pad = cached, answer
    try:
        yield
    finally:
        pad_mm.get_cached_should_pad, pad_mm.should_pad = known, decide


class _Asked(Exception):
    """torch does not know, and would time it."""


def _key(match: Any, *args: Any, **named: Any) -> str | None:
    """torch's own key of a product; None where its sizes need no padding."""
    from torch._inductor.fx_passes import pad_mm

    if not pad_mm.can_pad(*args, **named):
        return None
    return str(pad_mm.should_pad_bench_key(match, *args, **named))
