"""Options that ``run`` and ``fleet`` share, and what a scheduler's signal is to them."""

from __future__ import annotations

import signal
from types import FrameType

import click

deadline_options = (
    click.option(
        "--target-timeout",
        type=click.FloatRange(min=1),
        default=1800.0,
        show_default=True,
        metavar="SECONDS",
        help="End the process of a target that takes longer, and go on with the next.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        metavar="SECONDS",
        help="End all of it after this long; what is finished is kept.  [default: never]",
    ),
)


def heed_sigterm() -> None:
    """A scheduler ends jobs by SIGTERM: from now on it does what Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
