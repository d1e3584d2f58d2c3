"""Programs on GPUs: one compile for every index, the canary, threads beside a thread that traces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_gpu import COUNT, DEVICES, HERE, run

from compilecache.artifact import Record
from compilecache.engines.programfile import program_among, read_program, sealed, write_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]
TWO = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")


class Programs:
    """A plan of programs, and processes that use one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.yaml"
        self.store = folder / "store"
        ended = run("-m", "compilecache", "plan", "--workload", "dflash_model.workload:tiny",
                    "--seq-lens", "256", "--output", str(self.plan))  # fmt: skip
        assert ended.returncode == 0
        self.plan.write_text(self.plan.read_text() + "engine: program\n")
        self.cold = self.process("cold", DEVICES, "train", "threads")

    def process(
        self, root: str, devices: list[str], *more: str, store: Path | None = None
    ) -> dict[str, Any]:
        """A fresh process."""
        ended = run(str(HERE / "gpu_programs.py"), str(self.plan), str(store or self.store),
                    str(self.folder / root), ",".join(devices), *more)  # fmt: skip
        assert ended.returncode == 0
        said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return said


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """One cold warm-up for all tests here."""
    return Programs(tmp_path_factory.mktemp("programs"))


def statuses(said: dict[str, Any], device: str) -> set[str]:
    """Of the targets of a device."""
    return {row["status"] for row in said["report"]["targets"] if row["device"] == device}


def test_programs_are_compiled_on_one_index_and_rewritten_for_the_other(programs: Programs) -> None:
    """One compile for all; nothing was given up (pytorch#170123, pytorch#170621)."""
    assert programs.cold["report"]["gave_up"] == []
    assert {row["engine"] for row in programs.cold["report"]["targets"]} == {"program"}
    assert statuses(programs.cold, DEVICES[0]) == {"compiled"}
    for device in DEVICES[1:]:
        assert statuses(programs.cold, device) == {"rewritten"}, programs.cold["report"]
    assert programs.cold["unchanged"]
    assert programs.cold["compiles"] == 0


@TWO
def test_a_rewritten_program_computes_the_same_on_its_own_device_alone(programs: Programs) -> None:
    """Loss and every gradient; no byte on the other device."""
    here, there = programs.cold["steps"]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-3)
    for name, norm in here["norms"].items():
        assert there["norms"][name] == pytest.approx(norm, rel=2e-2), name
    assert here["elsewhere"]
    assert there["elsewhere"]


def test_threads_call_programs_while_another_thread_traces(programs: Programs) -> None:
    """No call is refused, none fails."""
    assert programs.cold["threads"]["errors"] == []
    assert programs.cold["threads"]["turns"] > 3


def test_a_fresh_process_restores_and_traces_nothing(programs: Programs) -> None:
    """Not one frame, launch or miss, no kernel timed; on both devices by what was published."""
    said = programs.process("restored", DEVICES, "train")
    for row in said["report"]["targets"]:
        assert row["status"] == "restored", row
        assert row["evidence"]["launches"] == 0, row
        assert row["evidence"]["foreign_files"] == [], row
    assert said["frames"] == 0
    assert said["timed"] == []
    assert said["steps"][0]["loss"] == pytest.approx(programs.cold["steps"][0]["loss"], rel=1e-6)


@TWO
def test_a_process_with_the_other_device_alone_rewrites_too(programs: Programs) -> None:
    """As one rank of many does: the reference travels with the program."""
    store = only_first(programs, "first")
    said = programs.process("alone", DEVICES[1:2], "train", store=store)
    assert statuses(said, DEVICES[1]) == {"rewritten"}, said["report"]
    assert said["steps"][0]["loss"] == pytest.approx(programs.cold["steps"][1]["loss"], rel=1e-3)


@TWO
def test_a_canary_that_fails_lets_the_device_compile_for_itself(programs: Programs) -> None:
    """A reference that says something else: refused, with the reason in the report."""
    store = only_first(programs, "wrong")
    root = programs.folder / "wrong-root"
    shutil.copytree(programs.folder / "cold", root)
    spoil(root)
    said = programs.process("wrong-root", DEVICES[1:2], "train", store=store)
    rows = [row for row in said["report"]["targets"] if "forward train" in row["target"]]
    assert rows
    for row in rows:
        assert row["status"] == "compiled", row
        assert "the canary failed" in row["notes"][0], row
        assert row["engine"] == "program"
    assert said["steps"][0]["loss"] == pytest.approx(programs.cold["steps"][1]["loss"], rel=1e-3)


def only_first(programs: Programs, name: str) -> Path:
    """A copy of the store with what the first device published."""
    store = programs.folder / f"store-{name}"
    shutil.copytree(programs.store, store)
    for folder in store.glob("v1/*/artifacts/*"):
        if not folder.name.startswith("cuda0-"):
            shutil.rmtree(folder)
    return store


def spoil(root: Path) -> None:
    """Every training program of the root expects twice the norm of every gradient."""
    for path in root.glob(".compilecache/records/*/*.json"):
        record = Record.parse(path.read_bytes())
        if record.target is None or not path.name.startswith("cuda0-"):
            path.unlink()
            continue
        program = program_among([entry.path for entry in record.files])
        if record.target.spec.phase != "train" or program is None:
            continue
        header, data = read_program(root / program)
        assert header.reference is not None
        wrong = {
            name: type(one)(one.elements, one.norm * 2, one.products)
            for name, one in header.reference.items()
        }
        changed = header.model_copy(update={"reference": wrong, **sealed(data)})
        (root / program).unlink()
        (root / write_program(root, changed, data)).rename(root / program)
        entries = tuple(replaced(root, entry) for entry in record.files)
        fields = record.model_dump() | {"files": entries}
        path.write_bytes(Record.model_validate(fields).dump())


def replaced(root: Path, entry: Any) -> Any:
    """The entry with the size and digest that its file has now."""
    from dataclasses import replace

    from compilecache.artifact import hash_files

    size, digest = hash_files(root, [entry.path])[entry.path]
    return replace(entry, size=size, xxh3_128=digest)
