"""``compilecache gpu-profile``: what a compile must know of a GPU, recorded where there is one."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import options as common


@click.command("gpu-profile", epilog="Example: compilecache gpu-profile --output h100.json")
@click.option("--device", default="cuda:0", show_default=True, help="The GPU.")
@click.option(
    "--plan",
    "plans",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    multiple=True,
    help="Also record what torch asks the GPU while it traces this plan: which kernel an attention "
    "becomes, which products are faster padded. May be given several times.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it there.  [default: print it]",
)
def gpu_profile(*, device: str, plans: tuple[Path, ...], output: Path | None) -> None:
    """Record what 'compilecache warm --gpu-profile' must know of a GPU, as JSON."""
    from compilecache.answers import answers_for
    from compilecache.gpuprofile import record

    common.refuse_unwritable(output)
    loaded = [common.load_plan(path, None, (), None) for path in plans]
    profile = record(device)
    if loaded:
        said = answers_for(loaded, device)
        profile = profile.model_copy(update={"attention": said.attention, "padding": said.padding})
    if output is None:
        click.echo(profile.dump(), nl=False)
        return
    common.write_file(output, profile.dump().encode())
    words = [profile.name, f"CUDA {profile.cuda}", f"Triton {profile.triton}"]
    if loaded:
        words += [common.count(len(profile.attention), "attention")]
        words += [common.count(len(profile.padding), "padding")]
    common.tell(f"Wrote {output}: {', '.join(words)}.")
