"""``warmup``: one JSON line, the exit codes, and a ready file only when everything is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from places import Place
from processes import Template


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
