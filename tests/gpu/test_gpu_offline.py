"""Programs that were compiled where no GPU was seen: first contact with a real one, and the start after it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_offline
import pytest
from test_gpu import COUNT, DEVICES, HERE, run
from test_gpu_programs import replaced

from compilecache.artifact import Record
from compilecache.engines.programfile import Header, program_among, read_program, write_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]

Said = dict[str, Any]


class Offline:
    """What was compiled without a GPU, and processes that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan, self.profile = folder / "plan.yaml", folder / "profile.json"
        self.plan.write_text(gpu_offline.plan().dump())
        recorded = run("-m", "compilecache", "gpu-profile", "--output", str(self.profile))
        assert recorded.returncode == 0
        ended = run("-m", "compilecache", "warm", str(self.plan), "--gpu-profile", str(self.profile),
                    "--store", str(folder / "store"), "--root", str(folder / "offline"), "--json")  # fmt: skip
        assert ended.returncode == 0
        self.compiled: list[Said] = json.loads(ended.stdout)["targets"]
        shutil.copytree(folder / "store", folder / "untouched")
        self.first = self.start("first", DEVICES)

    def start(
        self, root: str, devices: list[str], *words: str, store: str | None = "store"
    ) -> Said:
        """A fresh process with the GPUs."""
        place = str(self.folder / store) if store else "none"
        ended = run(str(HERE / "gpu_offline.py"), str(self.plan), place, str(self.folder / root),
                    ",".join(devices), *words)  # fmt: skip
        assert ended.returncode == 0
        said: Said = json.loads(ended.stdout.splitlines()[-1])
        return said

    def untouched(self, name: str) -> str:
        """A copy of the store as the offline process left it."""
        shutil.copytree(self.folder / "untouched", self.folder / name)
        return name


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    """One offline compile for all tests here."""
    return Offline(tmp_path_factory.mktemp("offline"))


def rows(said: Said, device: str) -> list[Said]:
    """The targets of a device."""
    return [row for row in said["report"]["targets"] if row["device"] == device]


def test_first_contact_compiles_nothing_and_times_what_has_a_choice(offline: Offline) -> None:
    """No compiler starts; the gradients are eager's; other devices take the settled program."""
    assert {row["status"] for row in offline.compiled} == {"compiled"}
    assert offline.first["report"]["gave_up"] == []
    for row in offline.first["report"]["targets"]:
        assert row["evidence"]["launches"] == 0, row
        assert row["engine"] == "program", row
        assert row["notes"] == [], row
    assert {row["status"] for row in rows(offline.first, DEVICES[0])} == {"restored"}
    for device in DEVICES[1:]:
        assert {row["status"] for row in rows(offline.first, device)} == {"rewritten"}
    assert offline.first["frames"] == 0
    assert offline.first["timed"]
    assert max(offline.first["apart"]) < 1e-3


def test_the_second_start_times_nothing_and_launches_nothing(offline: Offline) -> None:
    """It restores what the first one published."""
    said = offline.start("second", DEVICES)
    assert said["report"]["gave_up"] == []
    for row in said["report"]["targets"]:
        assert row["status"] == "restored", row
        assert row["evidence"]["launches"] == 0, row
        assert row["evidence"]["foreign_files"] == [], row
    assert said["timed"] == []
    assert said["frames"] == 0
    assert max(said["apart"]) < 1e-3


def test_what_was_settled_says_so(offline: Offline) -> None:
    """No profile in the header any more, and something to compare other devices with."""
    for path in (offline.folder / "second").glob(".compilecache/records/*/cuda0-*.json"):
        record = Record.parse(path.read_bytes())
        program = program_among([entry.path for entry in record.files])
        assert program is not None
        header, _ = read_program(offline.folder / "second" / program)
        assert header.profile is None
        assert header.reference is not None
        assert record.generation == 2


def test_a_pod_that_settles_what_is_settled_keeps_it_to_itself(offline: Offline) -> None:
    """Its root still had what was compiled without the GPU; the store has another generation by then."""
    shutil.copytree(offline.folder / "offline", offline.folder / "stale")
    said = offline.start("stale", DEVICES[:1])
    assert said["report"]["gave_up"] == []
    for row in rows(said, DEVICES[0]):
        assert row["status"] == "local", row
        assert not row["published"], row
    records = (offline.folder / "store").glob("v1/*/artifacts/cuda0-*/*.json")
    assert {path.stem for path in records} == {"1", "2"}


def test_a_canary_that_fails_lets_the_gpu_compile_for_itself(offline: Offline) -> None:
    """What it compiles is published, and the next start has it."""
    store = offline.untouched("store-wrong")
    said = offline.start("wrong", DEVICES[:1], "wrong", store=store)
    for row in rows(said, DEVICES[0]):
        assert row["status"] == "compiled", row
        assert row["engine"] == "program"
        assert "the canary failed" in row["notes"][0]
    assert "is not used here: the canary failed" in " ".join(said["report"]["gave_up"])
    assert max(said["apart"]) < 1e-3
    again = offline.start("wrong-again", DEVICES[:1], "wrong", store=store)
    assert again["report"]["gave_up"] == []
    assert {row["status"] for row in rows(again, DEVICES[0])} == {"restored"}


def test_a_canary_that_fails_is_an_error_with_strict(offline: Offline) -> None:
    """Before anything is compiled; the reason is told."""
    store = offline.untouched("store-strict")
    said = offline.start("strict", DEVICES[:1], "wrong", "strict", store=store)
    assert said["kind"] == "CompileFailed"
    assert "the canary failed" in said["error"]


def test_another_gpu_than_the_profiles_is_refused_by_its_field(offline: Offline) -> None:
    """A profile that somebody edited: what it says is not what this GPU is; the GPU compiles for itself."""
    root = offline.folder / "other"
    shutil.copytree(offline.folder / "offline", root)
    rewrite(root, fewer_registers)
    said = offline.start("other", DEVICES[:1], store=None)
    for row in rows(said, DEVICES[0]):
        assert row["status"] == "compiled", row
        assert "gpu.regs_per_multiprocessor = 32768, here it is" in row["notes"][0]
    assert "gpu.regs_per_multiprocessor" in " ".join(said["report"]["gave_up"])


def fewer_registers(header: Header) -> Header:
    """The same for a GPU with half as many."""
    assert header.profile is not None
    profile = header.profile.model_copy(update={"regs_per_multiprocessor": 32768})
    return header.model_copy(update={"profile": profile})


def rewrite(root: Path, change: Callable[[Header], Header]) -> None:
    """Every program of a root with another header, under its old name."""
    for path in root.glob(".compilecache/records/*/*.json"):
        record = Record.parse(path.read_bytes())
        program = program_among([entry.path for entry in record.files])
        if program is None:
            continue
        header, data = read_program(root / program)
        (root / program).unlink()
        (root / write_program(root, change(header), data)).rename(root / program)
        entries = tuple(replaced(root, entry) for entry in record.files)
        fields = record.model_dump() | {"files": entries}
        path.write_bytes(Record.model_validate(fields).dump())
