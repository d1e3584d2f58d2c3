"""A cache baked into an image: moved, read only, another user's, damaged; and the store behind it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place
from processes import Template
from training import Trained, warm_and_train

from compilecache.baked import bake, open_baked
from compilecache.cachedir import CacheDir
from compilecache.restoring import Restoration, restore_plan
from compilecache.shapes import ShapePlan


def _bake(place: Place, folder: Path) -> tuple[str, ...]:
    cache = CacheDir(place.root)
    return bake(place.plan, ["cpu"], cache, folder, print).published


@pytest.fixture
def image(fresh: Template, warmed: Place) -> Iterator[Path]:
    """What the warm root holds, baked and then moved; only the plan is left of the rest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "laid", "here")
        assert len(fresh.call(_bake, warmed, folder)) == 3
        moved = Path(name, "image")
        folder.rename(moved)
        shutil.rmtree(warmed.root)
        shutil.rmtree(warmed.store)
        Path(name).chmod(0o755)
        yield moved


def statuses(trained: Trained) -> list[str]:
    """Of all targets."""
    return [row.status for row in trained.report.targets]


def test_nobody_may_write_it_and_everybody_read_it(image: Path) -> None:
    """Folders and files, whatever the modes of the root they came from."""
    below = [image, *image.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in below if path.is_dir()} == {0o555}
    assert {path.stat().st_mode & 0o777 for path in below if path.is_file()} == {0o444}


def _restore_as_another(place: Path, plan: Path, image: Path) -> Restoration:
    if os.getuid() == 0:
        os.setuid(54321)
    cache = CacheDir(place / "root")
    cache.prepare()
    return restore_plan(ShapePlan.load(plan), ["cpu"], cache, None, print, baked=open_baked(image))


def test_moved_and_read_only_it_serves_another_user(
    fresh: Template, warmed: Place, image: Path
) -> None:
    """Everything restored into a root of that user's own; with it, nothing is compiled.

    Inductor itself could not run under that uid where the interpreter lies in a home of root's.
    """
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o1777)
        plan = Path(shutil.copy(warmed.plan_file, place / "plan.yaml"))
        done = fresh.call(_restore_as_another, place, plan, image, cwd=place)
        assert (done.restored, done.missing, done.faults) == (3, (), ())
        for path in (place / "root", *(place / "root").rglob("*")):
            os.chown(path, os.getuid(), -1, follow_symlinks=False)
        trained = fresh.call(warm_and_train, plan, place / "root", False, strict=True)
    assert statuses(trained) == ["local"] * 3
    assert sum(row.evidence.launches for row in trained.report.targets if row.evidence) == 0


def test_the_variable_of_the_image_is_enough(fresh: Template, warmed: Place, image: Path) -> None:
    """``ENV COMPILECACHE_BAKED`` in its Dockerfile; pull, explain and ensure_warm look there first."""
    env = {"COMPILECACHE_BAKED": str(image)}
    words = (warmed.plan_file, "--device", "cpu", "--root", warmed.root, "--store", "none")
    told = fresh.command("explain", *words, "--json", env=env).json
    assert {target["state"] for target in told["targets"]} == {"in image"}  # type: ignore[attr-defined]
    assert fresh.command("restore", *words, "--json", env=env).json["restored"] == 3
    trained = fresh.call(warm_and_train, warmed.plan_file, warmed.root, False, env=env)
    assert statuses(trained) == ["local"] * 3


def test_what_is_damaged_in_the_image_comes_from_the_store(
    fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """A flipped byte in a pack; the run says so and goes on."""
    folder = tmp_path / "image"
    fresh.call(_bake, warmed, folder)
    shutil.rmtree(warmed.root)
    pack = max(folder.rglob("*.tar.zst"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    trained = fresh.call(warm_and_train, warmed.plan_file, warmed.root, warmed.store, baked=folder)
    assert statuses(trained) == ["restored"] * 3
    assert any(pack.name[:12] in text for text in trained.report.gave_up)


def test_baking_again_adds_what_is_new(fresh: Template, warmed: Place, image: Path) -> None:
    """Nothing, here; and what was there stays as it was."""
    before = {path: path.stat().st_ino for path in image.rglob("*")}
    env = {"COMPILECACHE_BAKED": str(image)}
    words = (warmed.plan_file, "--device", "cpu", "--root", warmed.root, "--store", "none")
    assert fresh.command("restore", *words, env=env).code == 0
    assert fresh.call(_bake, warmed, image) == ()
    assert {path: path.stat().st_ino for path in image.rglob("*")} == before


def test_an_image_that_others_may_write_is_not_read(
    fresh: Template, warmed: Place, image: Path
) -> None:
    """The command refuses it with the folder's name; a training run says so and goes on."""
    image.chmod(0o777)
    words = (warmed.plan_file, "--device", "cpu", "--root", warmed.root, "--store", "none")
    ended = fresh.command("restore", *words, "--baked", image)
    assert ended.code == 4
    assert str(image) in ended.err


def test_a_variable_that_points_nowhere_is_said_and_survived(
    fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """The store serves the run; the command is a usage error."""
    env = {"COMPILECACHE_BAKED": str(tmp_path / "gone")}
    trained = fresh.call(warm_and_train, warmed.plan_file, warmed.root, warmed.store, env=env)
    assert statuses(trained) == ["local"] * 3
    assert any("no baked cache" in text for text in trained.report.gave_up)
    assert fresh.command("restore", *warmed.words, env=env).code == 2
