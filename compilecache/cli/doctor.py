"""``compilecache doctor``: what is wrong here, why it matters, and the command that mends it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED, DONE, FAULT, NOT_WARM
from compilecache.cli import options as common
from compilecache.doctor.finding import LEVELS
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.doctor.finding import Diagnosis, Finding, Level

WIDTH = 80
HEADINGS: tuple[tuple[Level, str], ...] = (
    ("error", "BROKEN"),
    ("warning", "WARNING"),
    ("note", "note"),
)
CODES = {"root": DAMAGED, "lock": FAULT, "store": FAULT}
"""Of errors, by group; that of all others, and of warnings, is 3."""


@click.command(epilog="Example: compilecache doctor plan.yaml --store s3://bucket/cache")
@click.argument(
    "plan_file", metavar="[PLAN]", required=False, type=click.Path(path_type=Path, dir_okay=False)
)
@common.with_options(
    common.device_option, common.store_option, common.root_option, *common.workload_options
)
@click.option(
    "--compile",
    "compiling",
    is_flag=True,
    help="Compile one shape of each function and phase of PLAN, and name what torch never caches.",
)
@common.json_option
def doctor(
    plan_file: Path | None,
    *,
    devices: str | None,
    store: str | None,
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    compiling: bool,
    as_json: bool,
) -> None:
    """Say what is wrong with this machine, the cache root, the store and the settings.

    Each finding says what, why it matters, and the command that mends it. With PLAN also what
    differs from what is published. The root is made if there is none; in the store a small object is
    written and deleted. Leaves with 0 when nothing is worse than a note, 3 for warnings, 1 for a
    store or lock that does not work, 4 for a root that cannot be used or trusted.
    """
    if compiling and plan_file is None:
        raise click.UsageError("--compile needs a PLAN, which says what to compile")
    plan = common.load_plan(plan_file, workload, settings, engine) if plan_file else None
    places = common.choose_devices(devices)
    from compilecache.cachedir import CacheDir
    from compilecache.doctor.examination import Patient, examine

    name = str(plan_file or "PLAN")
    found = examine(Patient(CacheDir(root), store, places, plan, name, compiling))
    if as_json:
        common.print_json(found.as_json())
    else:
        click.echo("\n".join(_lines(found)))
    raise SystemExit(code_of(found))


def code_of(found: Diagnosis) -> int:
    """The exit code: that of the gravest trouble."""
    codes = {CODES.get(group, NOT_WARM) for group, _ in found.of("error")}
    codes |= {NOT_WARM for _ in found.of("warning")}
    return next((code for code in (DAMAGED, FAULT, NOT_WARM) if code in codes), DONE)


def _lines(found: Diagnosis) -> Iterator[str]:
    yield _summary(found)
    for level, heading in HEADINGS:
        for group, finding in found.of(level):
            yield ""
            yield from _paragraph(f"{heading} {group}: ", finding)
    fine = list(found.of("ok"))
    if fine:
        yield ""
        yield from textwrap.wrap(
            "Fine: " + "; ".join(finding.what for _, finding in fine) + ".", WIDTH
        )


def _summary(found: Diagnosis) -> str:
    counts = {level: len(list(found.of(level))) for level in LEVELS}
    words: tuple[tuple[Level, str], ...] = (
        ("error", "broken"),
        ("warning", "warning" if counts["warning"] == 1 else "warnings"),
        ("note", "note" if counts["note"] == 1 else "notes"),
    )
    told = ", ".join(f"{counts[level]} {word}" for level, word in words if counts[level])
    return f"{told or 'Nothing is wrong'}; {counts['ok']} checks are fine"


def _paragraph(heading: str, finding: Finding) -> Iterator[str]:
    yield from textwrap.wrap(
        heading + finding.what, WIDTH, break_long_words=False, break_on_hyphens=False
    )
    if finding.why:
        yield from textwrap.wrap(finding.why, WIDTH, initial_indent="  ", subsequent_indent="  ")
    if finding.is_command:
        yield f"  $ {finding.fix}"  # never wrapped: it is copied
    elif finding.fix:
        yield from textwrap.wrap(
            f"{finding.fix}.", WIDTH, initial_indent="  ", subsequent_indent="  "
        )
