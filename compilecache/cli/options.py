"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from compilecache.errors import CompileCacheError
from compilecache.keeping import GRACE_HOURS
from compilecache.shapes import TARGET_LIMIT, EngineName, ShapePlan

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.extras import ExtraRoot
    from compilecache.progress import Progress
    from compilecache.store import ArtifactStore
    from compilecache.tags import Tag

F = TypeVar("F", bound=Callable[..., object])

plan_argument = click.argument(
    "plan_file", metavar="PLAN", type=click.Path(path_type=Path, dir_okay=False)
)
optional_plan_argument = click.argument(
    "plan_file", metavar="[PLAN]", required=False, type=click.Path(path_type=Path, dir_okay=False)
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
device_option = click.option(
    "--device",
    "devices",
    metavar="D,D",
    help="Devices, with the index the trainer uses.  [default: every GPU, else cpu]",
)
store_option = click.option(
    "--store",
    metavar="URL",
    help="Artifact store: a folder, s3://…, memory://, or 'none'.  "
    "[default: COMPILECACHE_STORE, else ~/.cache/compilecache/store]",
)
baked_option = click.option(
    "--baked",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Cache that came with the image, looked into before the store.  [default: "
    "COMPILECACHE_BAKED, else none]",
)
sign_option = click.option(
    "--sign-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Private key that signs what is published.  [default: COMPILECACHE_SIGN_KEY, else no "
    "signature]",
)
trust_option = click.option(
    "--trust-key",
    "trust_keys",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Public key; what none of these signed is not used. Repeatable.  [default: "
    "COMPILECACHE_TRUST_KEYS, else everything is used]",
)
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Cache root.  [default: COMPILECACHE_ROOT, TORCHINDUCTOR_CACHE_DIR, torch's own]",
)
network_option = click.option(
    "--allow-network-root", is_flag=True, help="Use a cache root on a network file system."
)
extra_option = click.option(
    "--extra-root",
    "extra_roots",
    multiple=True,
    metavar="NAME[=DIR]",
    help="Also the cache of another compiler: triton, cuda, flashinfer, tilelang, deepgemm, or any "
    "NAME=DIR. Repeatable.  [default: COMPILECACHE_EXTRA_ROOTS, else none]",
)
lock_option = click.option(
    "--lock-timeout",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another process that fills the same root, or compiles a target for it.",
)
share_option = click.option(
    "--no-share",
    is_flag=True,
    help="Compile all that is missing, also what another process is compiling for the store.",
)
limit_option = click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=TARGET_LIMIT,
    show_default=True,
    help="Most targets allowed.",
)
tag_option = click.option(
    "--tag",
    "tag_name",
    metavar="NAME",
    help="What 'compilecache tag' named, its youngest, or NAME@GENERATION.",
)
workload_options = (
    click.option("--workload", metavar="MODULE:ATTR", help="Instead of the plan's own."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Workload setting; VALUE is JSON or text. Repeatable.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["trace", "program", "auto"]),
        help="Instead of the plan's own: trace at every start, or compile ahead of time.",
    ),
)

profile_option = click.option(
    "--gpu-profile",
    metavar="FILE",
    help="Compile for the GPU that this describes, on a machine without it: a file of 'compilecache "
    "gpu-profile', or the name of one that is shipped (h200). Experimental; engine program.",
)

side_options = (
    click.option("--local", is_flag=True, help="The cache root; with --remote too, both."),
    click.option(
        "--remote",
        is_flag=True,
        help="The store.  [default: the side that --store or --root names, else both]",
    ),
)


def grace_option(words: str) -> Callable[[F], F]:
    """What is young: ``words`` say what that means for the command."""
    return click.option(
        "--grace-hours",
        type=click.FloatRange(min=0),
        default=GRACE_HOURS,
        show_default=True,
        metavar="HOURS",
        help=words,
    )


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, listed in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def load_plan(
    path: Path,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None = None,
) -> ShapePlan:
    """The plan file, with another workload, settings or engine where the command line names them."""
    from compilecache.planning import parse_settings

    plan = ShapePlan.load(path)
    changes: dict[str, object] = {}
    if workload is not None:
        changes |= {"workload": workload, "settings": {}}
    if settings:
        kept = {} if workload is not None else plan.settings
        changes["settings"] = {**kept, **parse_settings(settings)}
    if engine is not None:
        changes["engine"] = engine
    return plan.model_copy(update=changes)


def choose_devices(devices: str | None) -> list[str]:
    """The devices asked for, or every GPU, or the CPU. Raises PlanError for one that is not here."""
    from compilecache.replicas import refuse_absent

    if devices is None:
        import torch

        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    chosen = names_of(devices)
    for device in chosen or [devices]:
        refuse_absent(device)
    return chosen


def refuse_with_profile(devices: str | None, *, verify: bool, extra_roots: Sequence[str]) -> None:
    """Raises a usage error for what cannot go together with --gpu-profile."""
    if devices not in (None, "cuda:0"):
        raise click.UsageError(
            "--gpu-profile takes no --device: what it compiles serves every index of that GPU"
        )
    if verify:
        raise click.UsageError(
            "--gpu-profile and --verify exclude each other: nothing can run here"
        )
    if extra_roots:
        raise click.UsageError("--gpu-profile and --extra-root exclude each other")


def names_of(devices: str) -> list[str]:
    """The devices that an option names, each once."""
    return list(dict.fromkeys(name.strip() for name in devices.split(",") if name.strip()))


def open_root(root: Path | None, *, allow_network: bool = False) -> CacheDir:
    """The cache root, created and checked."""
    from compilecache.cachedir import CacheDir

    cache = CacheDir(root)
    cache.prepare(allow_network=allow_network)
    return cache


def open_extras(words: tuple[str, ...], cache: CacheDir) -> tuple[ExtraRoot, ...]:
    """The extra cache roots of the command line or the environment."""
    from compilecache.extras import extra_roots

    return extra_roots(words or None, cache)


def open_store(
    store: str | None, trust_keys: tuple[Path, ...] = (), sign_key: Path | None = None
) -> ArtifactStore | None:
    """The store, with the keys of the command line or the environment; None for the word 'none'."""
    from compilecache.store import ArtifactStore

    if store == "none":
        return None
    return ArtifactStore.open(store, sign_key=sign_key, trust_keys=trust_keys or None)


def full_digest(store: ArtifactStore, digest: str) -> str:
    """The fingerprint of the store that begins so."""
    found = [known for known in store.fingerprints() if known.startswith(digest)]
    if len(found) != 1:
        problem = f"{len(found)} fingerprints of '{store.url}' start with '{digest}'"
        raise click.UsageError(f"{problem}; see 'compilecache ls --store {store.url}'")
    return found[0]


def find_tag(store: ArtifactStore, name: str) -> Tag:
    """What a tag's name means; younger ones of the name that cannot be used are told of."""
    found = store.tags.find(name)
    for text in found.passed_over:
        tell(f"warning: {text}; {found.tag.full_name} is used")
    return found.tag


@dataclass(frozen=True, slots=True)
class Sides:
    """Which of the two a command is about."""

    local: bool
    remote: bool


def chosen_sides(local: bool, remote: bool, store: str | None, root: Path | None) -> Sides:
    """What was asked for; else what has an address on the command line; else both."""
    if not (local or remote):
        local, remote = root is not None, store is not None
    return Sides(local, remote) if local or remote else Sides(local=True, remote=True)


def show_progress(stack: ExitStack) -> Progress:
    """A bar on a terminal, plain lines elsewhere, always on standard error."""
    from compilecache.progress import BarProgress, LineProgress

    return stack.enter_context(BarProgress()) if sys.stderr.isatty() else LineProgress()


def write_file(path: Path, data: bytes) -> None:
    """All of it or nothing. Raises CompileCacheError naming the file."""
    from compilecache.files import replacing

    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def refuse_unwritable(*paths: Path | None) -> None:
    """Raises CompileCacheError for a file that cannot be written, before there is something to lose."""
    for path in paths:
        if path is not None:
            try:
                with tempfile.TemporaryFile(dir=path.parent):
                    pass
            except OSError as error:
                raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CompileCacheError:
    return CompileCacheError(
        f"file '{path}' cannot be written: {error.strerror}",
        next_step="Name a file in a folder that this user may write",
    )


@contextmanager
def showing_transfers(store: ArtifactStore | None) -> Iterator[None]:
    """Shows what comes from the store and what goes there while the block runs."""
    with ExitStack() as stack:
        if store is not None:
            store.listener = show_progress(stack).moving
        yield


def tell(text: str) -> None:
    """A word for people, on standard error."""
    click.echo(text, err=True)


def print_json(data: object) -> None:
    """Data of a command, on standard output."""
    click.echo(json.dumps(data, indent=2, sort_keys=False))


def print_table(
    title: str,
    rows: Sequence[tuple[str, ...]],
    columns: tuple[str, ...],
    numbers: tuple[str, ...] = (),
) -> None:
    """A table on standard output: columns of words, then of numbers; the title alone without rows."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    click.echo(title)
    if not rows:
        return
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def escape(text: str) -> str:
    """Text in which rich sees no markup."""
    from rich.markup import escape as escaped

    return escaped(text)


def megabytes(size: int) -> str:
    """Bytes as MB, with one decimal."""
    return f"{size / 1e6:.1f}"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
