"""``compilecache fsck``: whether a store and a cache root hold what their records promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED
from compilecache.cli import options as common
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.fingerprint import Fingerprint
    from compilecache.inspection import Inspection
    from compilecache.store import ArtifactStore

SHOWN = 40
"""Findings of one place that are printed; ``--json`` has all."""


@click.command(
    epilog="Examples: compilecache fsck --store s3://bucket/cache --deep; "
    "compilecache fsck plan.yaml --repair"
)
@click.argument(
    "plan_file", metavar="[PLAN]", required=False, type=click.Path(path_type=Path, dir_okay=False)
)
@common.with_options(*common.side_options, common.store_option, common.root_option)
@common.with_options(common.sign_option, common.trust_option)
@click.option("--deep", is_flag=True, help="Read every pack and file, and check every digest.")
@click.option(
    "--repair",
    is_flag=True,
    help="Add what is missing: damaged targets from a root that has them whole, files of a root "
    "from the store, with PLAN its fingerprint.json.",
)
@common.grace_option("What is younger may not be finished yet, and is no finding.")
@common.with_options(common.device_option, *common.workload_options, common.lock_option)
@common.json_option
def fsck(
    plan_file: Path | None,
    *,
    local: bool,
    remote: bool,
    store: str | None,
    root: Path | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    deep: bool,
    repair: bool,
    grace_hours: float,
    devices: str | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    lock_timeout: float,
    as_json: bool,
) -> None:
    """Check that the store and the cache root hold what their records promise.

    Leaves with 4 when something is damaged. Orphans and half uploads harm nobody: 'compilecache gc'
    takes them. --repair only adds: nothing that is there is written anew.
    """
    from compilecache.cachedir import CacheDir

    sides = common.chosen_sides(local, remote, store, root)
    opened = common.open_store(store, trust_keys, sign_key)
    cache = CacheDir(root) if sides.local or repair else None
    if sides.remote and opened is None:
        raise click.UsageError("--store none holds nothing to check")
    repaired: dict[str, list[str]] = {}
    if repair and cache is not None:
        plan = (
            None if plan_file is None else common.load_plan(plan_file, workload, settings, engine)
        )
        mark = None
        if plan is not None:
            from compilecache.replicas import fingerprint_for

            mark = fingerprint_for(plan, common.choose_devices(devices)[0])
        repaired = _Repairs(opened, cache, mark, lock_timeout).run(sides, deep, grace_hours)
    done = _inspect(sides, opened, cache, deep, grace_hours)
    for side, part in done.items():
        part.repaired = repaired.get(side, [])
    if as_json:
        common.print_json({side: part.as_json() for side, part in done.items()})
    else:
        for part in done.values():
            _print(part)
    if any(part.damage for part in done.values()):
        raise SystemExit(DAMAGED)


def _inspect(
    sides: common.Sides,
    store: ArtifactStore | None,
    cache: CacheDir | None,
    deep: bool,
    grace_hours: float,
) -> dict[str, Inspection]:
    from compilecache.inspection import inspect_store
    from compilecache.rootinspection import inspect_root

    done = {}
    grace = grace_hours * 3600
    if sides.remote and store is not None:
        done["store"] = inspect_store(store, deep=deep, grace=grace, tell=common.tell)
    if sides.local and cache is not None:
        done["root"] = inspect_root(cache, deep=deep, grace=grace)
    return done


class _Repairs:
    """Looks, adds what can be added, and says so; whoever looks again sees the rest."""

    def __init__(
        self,
        store: ArtifactStore | None,
        cache: CacheDir,
        mark: Fingerprint | None,
        lock_timeout: float,
    ) -> None:
        self._store, self._cache, self._mark = store, cache, mark
        self._lock_timeout = lock_timeout

    def run(self, sides: common.Sides, deep: bool, grace_hours: float) -> dict[str, list[str]]:
        """What was added on those sides; the store first: the root is what it is repaired from."""
        from compilecache.repair import repair_root, repair_store

        there = self._cache.prepare_to_clean()
        found = _inspect(sides, self._store, self._cache, deep, grace_hours)
        if self._store is None or not any(part.damage for part in found.values()):
            return {}
        if not there:
            if "store" in found:
                repair_store(found["store"], self._store, None, self._mark)
        else:
            with self._cache.lock(
                "repairing",
                timeout=self._lock_timeout,
                waiting=lambda who: common.tell(f"waiting for {who}"),
            ):
                if "store" in found:
                    repair_store(found["store"], self._store, self._cache, self._mark)
                if "root" in found:
                    repair_root(found["root"], self._cache, self._store)
        for part in found.values():
            for text in part.repaired:
                common.tell(f"added {text}")
        return {side: part.repaired for side, part in found.items()}


def _print(done: Inspection) -> None:
    counts = [common.count(done.fingerprints, "fingerprint"), common.count(done.records, "record")]
    if done.tags:
        counts.append(common.count(done.tags, "tag"))
    more = (done.packs, "pack") if done.packs or not done.files else (done.files, "file")
    rows = [
        ("" if f.harmless else "DAMAGED", f.kind, f.fingerprint[:12], f.where, f.what)
        for f in sorted(done.findings, key=lambda f: f.harmless)
    ]
    common.print_table(
        f"{done.place}: {', '.join([*counts, common.count(*more)])}",
        rows[:SHOWN],
        ("", "kind", "fingerprint", "where", "what"),
    )
    if len(rows) > SHOWN:
        click.echo(f"  and {len(rows) - SHOWN} more; --json has all")
    harmless = len(done.findings) - len(done.damage)
    read = "every digest read" if done.deep else "names and sizes; --deep reads every digest"
    click.echo(f"{len(done.damage)} damaged, {harmless} harmless ({read})")
    if done.damage:
        click.echo(_next_step(done))


def _next_step(done: Inspection) -> str:
    if {finding.kind for finding in done.damage} == {"tag"}:
        return (
            "Tag a working run again, or let go of what cannot be used with\n"
            "'compilecache tag NAME@GENERATION --release'."
        )
    if done.packs or not done.files:
        return (
            "Run 'compilecache fsck PLAN --repair' where a complete cache root is, or warm\n"
            "and publish the targets again."
        )
    return "Run 'compilecache restore' or 'compilecache warm' with the plan: they mend what\nis damaged."
