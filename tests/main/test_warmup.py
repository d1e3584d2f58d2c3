"""``warmup``: one JSON line, the exit codes, and a ready file only when everything is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import Place
from processes import Template, environment

from compilecache.store import ArtifactStore


def line(out: str) -> dict[str, object]:
    """The one line on standard output."""
    (only,) = out.splitlines()
    told = json.loads(only)
    assert isinstance(told, dict)
    return told


def test_pull_brings_everything_then_writes_the_ready_file(
    fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """optimum-neuron#271: a job started before the fetch had ended."""
    shutil.rmtree(warmed.root)
    ready = tmp_path / "ready"
    ended = fresh.warmup("pull", *warmed.words, "--ready", str(ready))
    assert ended.code == 0, ended.err
    told = line(ended.out)
    assert told["state"] == "warm"
    assert told["restored"] == told["targets"]
    assert json.loads(ready.read_text()) == told


def test_pull_from_an_empty_store_is_cold(fresh: Template, warmed: Place, tmp_path: Path) -> None:
    """Exit code 3, no ready file, and nothing compiled."""
    shutil.rmtree(warmed.root)
    shutil.rmtree(warmed.store)
    ready = tmp_path / "ready"
    ended = fresh.warmup("pull", *warmed.words, "--ready", str(ready))
    assert ended.code == 3
    assert line(ended.out)["state"] == "cold"
    assert not ready.exists()


def test_pull_needs_no_store_for_what_is_there(fresh: Template, warmed: Place) -> None:
    """A store that is down keeps no pod from starting whose root, or image, has everything."""
    (warmed.folder / "a-file").write_text("no store")
    words = ("--store", str(warmed.folder / "a-file"), "--root", str(warmed.root), "--wait", "1")
    ended = fresh.warmup("pull", str(warmed.plan_file), "--device", "cpu", *words)
    assert ended.code == 0, ended.err
    assert line(ended.out)["state"] == "warm"


def test_pull_waits_for_a_store_and_then_says_that_it_is_down(
    fresh: Template, warmed: Place
) -> None:
    """The wait ends; the error names the store; no traceback."""
    shutil.rmtree(warmed.root)
    words = ["--store", str(warmed.folder / "a-file"), "--root", str(warmed.root)]
    (warmed.folder / "a-file").write_text("no store")
    plan = str(warmed.plan_file)
    ended = fresh.warmup("pull", plan, "--device", "cpu", "--wait", "1", *words)
    assert ended.code == 1
    assert "a-file" in ended.err
    assert "Traceback" not in ended.err


def digest_of(place: Place) -> str:
    """The fingerprint that the place's store has something for."""
    (digest,) = ArtifactStore.open(place.store).fingerprints()
    return digest


WITHOUT_TORCH = """
import sys
from warmup.cli import group
try:
    group.main(sys.argv[1:], standalone_mode=False)
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
assert "rich" not in sys.modules
"""


def test_pull_for_a_fingerprint_needs_no_torch(warmed: Place) -> None:
    """By its first digits; in a process of its own, which has everything in the root at the end."""
    shutil.rmtree(warmed.root)
    words = ["pull", *warmed.words, "--fingerprint", digest_of(warmed)[:7]]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = line(done.stdout)
    assert (told["state"], told["fingerprint"]) == ("warm", digest_of(warmed))
    assert told["restored"] == told["targets"] == 3


@pytest.mark.parametrize("shortened", [True, False])
def test_pull_refuses_a_fingerprint_that_nobody_published(
    fresh: Template, warmed: Place, shortened: bool
) -> None:
    """Exit code 2, and where to look."""
    digest = digest_of(warmed)
    other = ("0" if digest[0] != "0" else "1") + digest[1:]
    ended = fresh.warmup("pull", *warmed.words, "--fingerprint", other[:5] if shortened else other)
    assert ended.code == 2
    assert f"no published fingerprints begin with '{other[:5]}" in ended.err
    assert "compilecache ls" in ended.err


def test_pull_refuses_digits_that_two_fingerprints_begin_with(
    fresh: Template, warmed: Place
) -> None:
    """It says how many; all digits of one are enough again."""
    digest = digest_of(warmed)
    twin = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    shutil.copytree(warmed.store / "v1" / digest, warmed.store / "v1" / twin)
    ended = fresh.warmup("pull", *warmed.words, "--fingerprint", digest[:8])
    assert ended.code == 2
    assert f"2 published fingerprints begin with '{digest[:8]}'" in ended.err
    assert fresh.warmup("pull", *warmed.words, "--fingerprint", digest).code == 0
    renamed = fresh.warmup("pull", *warmed.words, "--fingerprint", twin)
    assert renamed.code == 4
    assert "is of another one" in renamed.err


def test_pull_without_devices_cannot_do_without_torch(fresh: Template, warmed: Place) -> None:
    """Only torch knows the machine's; the error says what to add."""
    words = (warmed.plan_file, "--root", warmed.root, "--store", warmed.store)
    ended = fresh.warmup("pull", *words, "--fingerprint", digest_of(warmed))
    assert ended.code == 2
    assert "--device" in ended.err


@pytest.mark.parametrize("store", ["none", "empty"])
def test_pull_takes_from_the_image_what_it_has(fresh: Template, warmed: Place, store: str) -> None:
    """With a fingerprint that only the image has, and a store that is empty, or none at all."""
    digest = digest_of(warmed)
    baked = warmed.folder / "baked"
    warmed.store.rename(baked)
    shutil.rmtree(warmed.root)
    address = "none" if store == "none" else warmed.folder / "empty"
    words = ("--device", "cpu", "--root", warmed.root, "--store", address, "--baked", baked)
    ended = fresh.warmup("pull", warmed.plan_file, *words, "--fingerprint", digest[:6])
    assert ended.code == 0, ended.err
    assert line(ended.out)["restored"] == 3
