"""``compilecache gpu-profile``: what a compile must know of a GPU, recorded where there is one."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import options as common


@click.command("gpu-profile", epilog="Example: compilecache gpu-profile --output h100.json")
@click.option("--device", default="cuda:0", show_default=True, help="The GPU.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it there.  [default: print it]",
)
def gpu_profile(*, device: str, output: Path | None) -> None:
    """Record what 'compilecache warm --gpu-profile' must know of a GPU, as JSON."""
    from compilecache.gpuprofile import record

    profile = record(device)
    if output is None:
        click.echo(profile.dump(), nl=False)
        return
    common.write_file(output, profile.dump().encode())
    common.tell(f"Wrote {output}: {profile.name}, CUDA {profile.cuda}, Triton {profile.triton}.")
