"""``compilecache tag``: name what a working run used; list, show and release such names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import options as common
from compilecache.errors import PlanError
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.store import ArtifactStore
    from compilecache.tags import Tag

SHOWN = ("plan", "constraints", "all")


@click.command(
    epilog="Examples: compilecache tag good plan.yaml --tokens-per-second 21500; "
    "compilecache tag good --show constraints; compilecache tag --list"
)
@click.argument("name", metavar="[NAME]", required=False)
@common.optional_plan_argument
@click.option(
    "--fingerprint",
    metavar="DIGEST",
    help="Without PLAN: tag all that is published for this one; its first digits are enough. "
    "[default: the one that the cache root used last]",
)
@click.option(
    "--tokens-per-second", type=float, metavar="RATE", help="What the run was measured to do."
)
@click.option("--note", default="", metavar="TEXT", help="Whatever you want to say of it.")
@click.option("--list", "as_list", is_flag=True, help="List the tags of the store.")
@click.option(
    "--show",
    type=click.Choice(SHOWN),
    help="Print what the tag holds: its plan (YAML), its packages as a constraints file, or all of "
    "it (JSON).",
)
@click.option(
    "--release",
    is_flag=True,
    help="Let go of NAME, or of NAME@GENERATION alone: 'compilecache gc' may take what it kept.",
)
@common.with_options(
    common.device_option,
    common.store_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
)
@common.json_option
def tag(
    name: str | None,
    plan_file: Path | None,
    *,
    fingerprint: str | None,
    tokens_per_second: float | None,
    note: str,
    as_list: bool,
    show: str | None,
    release: bool,
    devices: str | None,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    as_json: bool,
) -> None:
    """Name what a working run used, so that 'compilecache restore --tag NAME' brings it back.

    Artifacts in their very generations, the plan, installed packages, variables, settings and
    sources. A second tag of a name is its next generation; NAME@1 still means the first. What a tag
    names is never collected.
    """
    if sum([as_list, show is not None, release]) > 1:
        raise click.UsageError("--list, --show and --release are three different things")
    opened = common.open_store(store, trust_keys, sign_key)
    if opened is None:
        raise click.UsageError("--store none holds no tags")
    if as_list:
        _list(opened, name, as_json)
        return
    if name is None:
        raise click.UsageError("name the tag, or list them with --list")
    if show is not None:
        _show(opened, name, show)
        return
    if release:
        _release(opened, name, as_json)
        return
    plan = None if plan_file is None else common.load_plan(plan_file, workload, settings, engine)
    from compilecache.cachedir import CacheDir
    from compilecache.tagging import Words, check_new, make_tag

    words = Words(tokens_per_second, note)
    check_new(name, words)
    cache = CacheDir(root)
    if plan is not None:
        if fingerprint is not None:
            raise click.UsageError("name a PLAN or a --fingerprint, not both")
        places = common.choose_devices(devices)
        from compilecache.replicas import fingerprint_for

        digest = fingerprint_for(plan, places[0]).digest
        keys = [target.key for target in plan.targets(places)]
        made = make_tag(
            name, digest, opened, cache, keys=keys, plan=plan, devices=places, words=words
        )
    elif fingerprint is not None:
        made = make_tag(name, common.full_digest(opened, fingerprint), opened, None, words=words)
    else:
        made = make_tag(name, _last_used(cache), opened, cache, words=words)
    _print_made(made, as_json)


def _last_used(cache: CacheDir) -> str:
    digest = cache.last_used()
    if digest is None:
        raise click.UsageError(
            f"cache root '{cache.root}' has been used for nothing: name a PLAN or a --fingerprint"
        )
    return digest


def _print_made(made: Tag, as_json: bool) -> None:
    if as_json:
        common.print_json(_row(made))
        return
    click.echo(
        f"tag {made.full_name}: {common.count(len(made.records), 'record')}, "
        f"{common.count(len(made.surroundings.packages), 'package')}, fingerprint "
        f"{made.fingerprint[:12]}"
    )
    for source in made.surroundings.sources:
        if source.changed:
            common.tell(
                f"warning: {source.path} has changes that commit {str(source.commit)[:12]} does not "
                "hold: commit them and tag again, and the tag can say how to bring them back"
            )
    click.echo(f"Back to it: compilecache restore --tag {made.full_name}")


def _row(tag: Tag) -> dict[str, object]:
    return {
        "tag": tag.full_name,
        "created": tag.created,
        "fingerprint": tag.fingerprint,
        "records": len(tag.records),
        "bytes": tag.bytes,
        "tokens_per_second": tag.tokens_per_second,
        "devices": list(tag.devices),
        "torch": tag.components.get("torch", ""),
        "gpu": tag.components.get("gpu", ""),
        "note": tag.note,
    }


def _list(store: ArtifactStore, name: str | None, as_json: bool) -> None:
    from compilecache.cli.ls import age
    from compilecache.tags import parse_name

    shelf = store.tags.shelf(None if name is None else parse_name(name)[0])
    for entry in shelf.live:
        if entry.untrusted or entry.error is not None:
            problem = entry.untrusted or (entry.error.problem if entry.error else "")
            common.tell(f"not usable: {entry.full_name}: {problem}")
    if as_json:
        common.print_json({"store": store.url, "tags": [_row(tag) for tag in shelf.tags]})
        return
    common.print_table(
        f"{common.count(len(shelf.tags), 'tag')} in {store.url}",
        [
            (
                tag.full_name,
                tag.fingerprint[:12],
                f"torch {tag.components.get('torch', '?')}",
                tag.note,
                age(tag.created),
                "-" if tag.tokens_per_second is None else f"{tag.tokens_per_second:,.0f}",
                str(len(tag.records)),
            )
            for tag in shelf.tags
        ],
        ("tag", "fingerprint", "with", "note"),
        ("age", "tokens/s", "records"),
    )


def _show(store: ArtifactStore, name: str, what: str) -> None:
    tag = common.find_tag(store, name)
    if what == "constraints":
        click.echo(tag.surroundings.constraints, nl=False)
    elif what == "all":
        common.print_json(tag.model_dump(mode="json", exclude_none=True))
    elif tag.plan is None:
        raise PlanError(
            f"tag '{tag.full_name}' was made without a plan",
            next_step="Restore it by its name: that needs none",
            field="NAME",
        )
    else:
        click.echo(tag.plan.dump(), nl=False)


def _release(store: ArtifactStore, name: str, as_json: bool) -> None:
    released = store.tags.release(name)
    if as_json:
        common.print_json({"released": list(released)})
    else:
        click.echo(f"released {', '.join(released)}: 'compilecache gc' may take what it kept")
