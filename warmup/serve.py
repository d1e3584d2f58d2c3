"""``warmup serve``: the long-running service on a GPU host."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import options as common
from compilecache.errors import CompileCacheError


@click.command(
    epilog="Example: warmup serve --workload dflash_model.workload:tiny --store s3://bucket/cache"
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Settings as YAML; options stand above them.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="MODULE:ATTR",
    help="Put a workload on the allow-list; no other can be named. Repeatable.",
)
@click.option("--host", metavar="ADDRESS", help="Listen there.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0: a free one.  [default: 8480]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Ask for the token in its first line; needed to listen beyond loopback.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the queue there.  [default: ~/.local/state/compilecache/warmup]",
)
@common.with_options(
    common.device_option,
    common.store_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
)
def serve(
    config: Path | None,
    *,
    workloads: tuple[str, ...],
    host: str | None,
    port: int | None,
    token_file: Path | None,
    state: Path | None,
    devices: str | None,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
) -> None:
    """Take plans over HTTP and make them warm, one target at a time, with a page to watch.

    Prints one JSON line with its address once it listens. A target in hand when it is stopped may end
    within the grace time, or is given back; the next start goes on.
    """
    try:
        from warmup.service.parts import Parts
        from warmup.service.server import serve as serve_parts
    except ModuleNotFoundError as error:
        raise CompileCacheError(
            f"the service needs '{error.name}'",
            next_step="Install its extra: pip install 'compilecache[service]'",
        ) from error
    from warmup.service.settings import Settings

    given = {
        "host": host,
        "port": port,
        "token_file": token_file,
        "state": state,
        "devices": tuple(filter(None, (devices or "").split(","))) or None,
        "store": store,
        "sign_key": sign_key,
        "trust_keys": trust_keys or None,
        "root": root,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    settings = Settings.load(config, changes, more_workloads=workloads)
    serve_parts(Parts.assemble(settings))
