"""``compilecache publish``: send to the store what is warm here and not there yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import NOT_WARM
from compilecache.cli import options as common
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.adopt import Adopted
    from compilecache.store import ArtifactStore


@click.command(
    epilog="Examples: compilecache publish plan.yaml --store s3://bucket/cache; "
    "compilecache publish --from /tmp/torchinductor_me"
)
@click.argument(
    "plan_file", metavar="[PLAN]", required=False, type=click.Path(path_type=Path, dir_okay=False)
)
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="A cache directory that exists already: save it as it is, or, with PLAN, what its targets "
    "use, after proof in a fresh process.",
)
@common.with_options(
    common.device_option,
    common.store_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
    common.extra_option,
    common.lock_option,
)
@common.json_option
def publish(
    plan_file: Path | None,
    *,
    folder: Path | None,
    devices: str | None,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    as_json: bool,
) -> None:
    """Publish the targets of PLAN that are complete in the cache root, or adopt a directory.

    Nothing in the store is ever overwritten.
    """
    if plan_file is None and folder is None:
        raise click.UsageError("name a PLAN, or a cache directory with --from")
    opened = common.open_store(store, trust_keys, sign_key)
    if opened is None:
        raise click.UsageError("--store none cannot be published to")
    places = common.choose_devices(devices)
    if folder is not None:
        _adopt(folder, plan_file, opened, places, workload, settings, engine, as_json)
        return
    assert plan_file is not None
    plan = common.load_plan(plan_file, workload, settings, engine)
    cache = common.open_root(root)
    extras = common.open_extras(extra_roots, cache)
    from compilecache.jobs import publish_plan

    with common.showing_transfers(opened):
        done = publish_plan(
            plan, places, cache, opened, common.tell, lock_timeout=lock_timeout, extras=extras
        )
    if as_json:
        common.print_json(
            {
                "fingerprint": done.fingerprint,
                "published": done.published,
                "missing": done.missing,
                "extra_files": done.extra_files,
            }
        )
    else:
        click.echo(
            f"{len(done.published)} published, {done.known} there already, "
            f"{len(done.missing)} not warm here"
        )
        if extras:
            click.echo(f"{common.count(done.extra_files, 'file')} of extra roots published")
        for target in done.missing:
            click.echo(f"  not warm: {target}")
    if done.missing:
        raise SystemExit(NOT_WARM)


def _adopt(
    folder: Path,
    plan_file: Path | None,
    store: ArtifactStore,
    devices: list[str],
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    as_json: bool,
) -> None:
    from compilecache.adopt import adopt, adopt_plan

    with common.showing_transfers(store):
        if plan_file is None:
            adopted = adopt(folder, store, devices[0])
        else:
            adopted = adopt_plan(
                folder, store, common.load_plan(plan_file, workload, settings, engine), devices
            )
    cold = _cold(adopted)
    if as_json:
        common.print_json(
            {
                "fingerprint": adopted.fingerprint,
                "published": list(adopted.keys),
                "files": adopted.files,
                "bytes": adopted.bytes,
                "missing": cold,
            }
        )
    else:
        click.echo(
            f"published {', '.join(adopted.keys) or 'nothing'}: {adopted.files} files, "
            f"{adopted.bytes / 1e6:.1f} MB, fingerprint {adopted.fingerprint}"
        )
        for text in cold:
            click.echo(f"  not warm: {text}")
    if cold:
        raise SystemExit(NOT_WARM)


def _cold(adopted: Adopted) -> list[str]:
    rows = adopted.result.rows if adopted.result else ()
    return [str(row) for row in rows if not row.warm]
