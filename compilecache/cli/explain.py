"""``compilecache explain``: why a process here would start warm, or would not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED, NOT_WARM
from compilecache.cli import options as common
from compilecache.shapes import EngineName, ShapePlan

if TYPE_CHECKING:
    from compilecache.explaining import Explanation
    from compilecache.search import Changed, Finding, ProgramFacts, Published, State
    from compilecache.store import ArtifactStore

SHOWN = 36
"""Letters of a value that are shown whole."""
AROUND = 12
"""Letters of a long one that are shown before what differs."""


@click.command(
    epilog="Examples: compilecache explain plan.yaml --device cuda:0,cuda:1; "
    "compilecache explain --tag good"
)
@common.optional_plan_argument
@common.tag_option
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
)
@common.json_option
def explain(
    plan_file: Path | None,
    *,
    tag_name: str | None,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    as_json: bool,
) -> None:
    """Say why a process here would start warm with PLAN, or what has changed since a tag.

    Where each target would come from, what a program was compiled for and is not so here, and which
    published fingerprint comes nearest. Nothing is compiled, restored or written. Leaves with 3 when
    something is missing or does not fit, 4 when something in the cache root is damaged.

    With --tag: packages, versions, settings, variables, GPUs and sources that are not as they were,
    with PLAN its shapes too, and the commands that undo it. Leaves with 3 when anything is.
    """
    if tag_name is not None:
        plan = plan_file and common.load_plan(plan_file, workload, settings, engine)
        _since(tag_name, plan or None, store, common.open_store(store, trust_keys), as_json)
        return
    if plan_file is None:
        raise click.UsageError("name a PLAN, or a state that is known to work with --tag")
    plan = common.load_plan(plan_file, workload, settings, engine)
    opened = common.open_store(store, trust_keys)
    places = common.choose_devices(devices)
    from compilecache.baked import open_baked
    from compilecache.cachedir import CacheDir
    from compilecache.explaining import explain_plan

    image = open_baked(baked, trust_keys or None)
    found = explain_plan(plan, places, CacheDir(root), opened, image)
    if as_json:
        common.print_json(found.as_json())
    else:
        _print(found)
    if found.damaged:
        raise SystemExit(DAMAGED)
    if not found.warm:
        raise SystemExit(NOT_WARM)


def _since(
    name: str,
    plan: ShapePlan | None,
    address: str | None,
    store: ArtifactStore | None,
    as_json: bool,
) -> None:
    """What has changed since a tag was made; ``address``: the store as the command line names it."""
    if store is None:
        raise click.UsageError("--store none holds no tags")
    tag = common.find_tag(store, name)
    from compilecache.changes import changes_since
    from compilecache.cli.changes import print_changes

    found = changes_since(tag, plan, address)
    if as_json:
        common.print_json({**found.as_json(), "note": tag.note, "created": tag.created})
    else:
        print_changes(tag, found)
    if found.changes:
        raise SystemExit(NOT_WARM)


def _print(found: Explanation) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from compilecache.report import without_common

    shared, names = without_common([finding.target for finding in found.targets])
    named = list(zip(names, found.targets, strict=True))
    console = Console(highlight=False)
    console.print(_summary(found), markup=False)
    console.print(_table(named))
    if shared:
        console.print(Text(f"all: {shared}", style="italic"))
    for line in (*_facts(found), *_damage(found)):
        console.print(line, markup=False)
    for title, changed in _misfits(named):
        console.print(f"\n{title}", markup=False)
        console.print(_differences(changed, "compiled with"))
    for line in found.untrusted:
        console.print(f"not trusted: {line}", markup=False)
    if found.count("missing"):
        console.print(f"\n{_published(found)}", markup=False)
        for title, changed, reasons in _weighed(found.nearest):
            console.print(title, markup=False)
            console.print(_differences(changed, "published"))
            for reason in reasons:
                console.print(Padding(Text(reason), (0, 0, 0, 2)))
    console.print(f"\n{found.next_step}.", markup=False)


def _summary(found: Explanation) -> str:
    states: tuple[State, ...] = (
        "local", "in image", "in store", "by rewriting", "damaged", "missing"
    )  # fmt: skip
    counts = ", ".join(f"{n} {state}" for state in states if (n := found.count(state)))
    unfit = sum(bool(finding.changed) for finding in found.targets)
    tail = (
        f"; {_programs(unfit)} does not fit" if unfit == 1 else f"; {_programs(unfit)} do not fit"
    )
    noun = "target" if len(found.targets) == 1 else "targets"
    return (
        f"Fingerprint {found.fingerprint}\n"
        f"{len(found.targets)} {noun}: {counts}{tail if unfit else ''}"
    )


def _programs(count: int) -> str:
    return f"{count} program" if count == 1 else f"{count} programs"


def _table(named: list[tuple[str, Finding]]) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("target", "where", "engine"):
        table.add_column(column, overflow="fold")
    table.add_column("conditions", justify="right")
    table.add_column("fits")
    for name, finding in named:
        program = finding.program
        conditions = str(program.conditions) if program else "-"
        table.add_row(name, _where(finding), finding.engine or "-", conditions, _fits(finding))
    return table


def _where(finding: Finding) -> str:
    if finding.state == "by rewriting":
        return f"by rewriting {finding.origin}'s program"
    return finding.state


def _fits(finding: Finding) -> str:
    if finding.changed:
        return "NO"
    return "yes" if finding.program or finding.state == "local" else "-"


def _facts(found: Explanation) -> Iterator[str]:
    """Where programs were compiled, what of them nobody can check, and what goes without one."""
    programs = [finding.program for finding in found.targets if finding.program]
    places = [_compiled_on(program) for program in programs]
    for place in dict.fromkeys(places):
        yield f"{_programs(places.count(place))} compiled on {place}"
    unchecked = dict.fromkeys(source for p in programs for source in p.unchecked)
    if unchecked:
        yield f"not checked, since nobody can look it up again: {', '.join(unchecked)}"
    traced = sum(finding.engine == "trace" for finding in found.targets)
    if traced and found.engine == "program":
        yield (
            f"{traced} of the targets go by trace: no program could be made of them. The report of "
            "the 'compilecache warm' that compiled them says why"
        )


def _compiled_on(program: ProgramFacts) -> str:
    version, _, commit = program.torch.partition(" ")
    kind = f" ({program.hardware})" if program.hardware != program.device else ""
    return f"{program.device}{kind} with torch {version} {commit[:8]}"


def _damage(found: Explanation) -> Iterator[str]:
    faults = dict.fromkeys(fault for finding in found.targets for fault in finding.faults)
    yield from (f"damaged: {fault}" for fault in faults)


def _misfits(named: list[tuple[str, Finding]]) -> Iterator[tuple[str, Changed]]:
    """Programs that do not fit for the same reasons, together."""
    groups: list[tuple[Changed, list[str]]] = []
    for name, finding in named:
        group = next((names for changed, names in groups if changed == finding.changed), None)
        if group is not None:
            group.append(name)
        elif finding.changed:
            groups.append((finding.changed, [name]))
    for changed, names in groups:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"Does not fit: {names[0]}{more}", changed


def _published(found: Explanation) -> str:
    if found.trouble:
        return f"The store could not be asked: {found.trouble}."
    if found.store is None:
        return "No store was asked (--store none)."
    near = found.nearest
    if near is None:
        return f"Nothing is published in '{found.store}'."
    held = "1 target" if near.targets == 1 else f"{near.targets} targets"
    if not near.changed:
        return (
            f"The store has {held} of this very fingerprint, and not what is missing: "
            "another shape, phase or device."
        )
    count = len(near.changed)
    return (
        f"Nearest published fingerprint: {near.digest[:12]} ({held}).\n"
        f"It differs in {count} component{'s' if count > 1 else ''}:"
    )


def _weighed(near: Published | None) -> Iterator[tuple[str, Changed, list[str]]]:
    """What differs, first what is known to matter, each with a sentence for every component."""
    for matters, title in (
        (True, "Known to matter, since it enters torch's own keys:"),
        (False, "Only caution; torch's keys may be the same:"),
    ):
        changed = near.differing(matters=matters) if near else {}
        if near and changed:
            yield title, changed, _reasons(near, changed)


def _reasons(near: Published, changed: Changed) -> list[str]:
    """Components with the same sentence together."""
    groups: dict[str, list[str]] = {}
    for name in changed:
        groups.setdefault(near.weights[name].because, []).append(name)
    return [f"{', '.join(names)}: {because}." for because, names in groups.items()]


def _differences(changed: Changed, then: str) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("what", then, "here"):
        table.add_column(column, overflow="fold")
    for name, pair in changed.items():
        table.add_row(Text(name), *map(Text, apart(*pair)))
    return table


def apart(then: str, now: str) -> tuple[str, str]:
    """Two values; of long ones the parts in which they differ."""
    if max(len(then), len(now)) <= SHOWN:
        return then, now
    letters = enumerate(zip(then, now, strict=False))
    shared = next((i for i, (a, b) in letters if a != b), min(len(then), len(now)))
    start = max(0, shared - AROUND)
    return _from(then, start), _from(now, start)


def _from(text: str, start: int) -> str:
    end = start + 2 * SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
