"""Programs: loaded without tracing, right after every change or refused, by trace where they must."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import programmed
import pytest
import torch
from processes import Template
from programmed import CHANGES, Called, Saw, made_after
from torch import nn

from compilecache import aot_names
from compilecache.engines.programfile import Header
from compilecache.guard.probe import trace_effect
from compilecache.report import Report

PROGRAM = "its program"


@pytest.fixture(scope="module")
def root(cold_root: Path) -> Path:
    """A cache root, seeded with what torch asks the CPU."""
    return cold_root


@pytest.fixture(scope="module")
def cold_root(cold, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """See ``root``."""
    folder = tmp_path_factory.mktemp("programs") / "root"
    cold.seed(folder)
    return folder


@pytest.fixture(scope="module")
def called(fresh: Template, root: Path) -> dict[str, Called]:
    """What calls said after each change."""
    return fresh.call(programmed.call_after_changes, root)


@pytest.fixture(scope="module")
def places(fresh: Template, root: Path) -> dict[str, str]:
    """What calls said in other surroundings."""
    return fresh.call(programmed.surroundings, root)


def test_torch_has_every_name_that_programs_need() -> None:
    """Mend aot_names.py, loading_names.py, triton_names.py or state_names.py, and nothing else, when this fails."""
    assert aot_names.missing() == []


def test_a_missing_name_is_told_and_the_target_goes_by_trace(
    fresh: Template, tmp_path: Path
) -> None:
    """A torch without it still trains."""
    report = fresh.call(_without_a_name, tmp_path)
    assert {row.engine for row in report.targets} == {"trace"}
    assert "this torch has no torch._dynamo.gone" in report.gave_up[0]


def _without_a_name(root: Path) -> Report:
    aot_names._PLACES["torch._dynamo"] = ["gone"]
    return programmed.warm_and_compare(programmed.Product, root).report


def test_a_restored_program_traces_nothing(fresh: Template, tmp_path: Path) -> None:
    """Not one frame of Dynamo, in the warm-up or later; output and gradients as without it."""
    store = tmp_path / "store"
    made = fresh.call(_warm_and_count, tmp_path / "first", store, "program")
    assert [row.status for row in made[0].report.targets] == ["compiled", "compiled"]
    saw, frames = fresh.call(_warm_and_count, tmp_path / "second", store, "auto")
    assert [row.status for row in saw.report.targets] == ["restored", "restored"]
    assert {row.engine for row in saw.report.targets} == {"program"}
    assert all(row.evidence.compiled_nothing for row in saw.report.targets if row.evidence)
    assert saw.right
    assert frames == 0
    assert saw.frames == 0
    assert saw.report.gave_up == ()


def _warm_and_count(root: Path, store: Path, engine: str) -> tuple[Saw, int]:
    trace_effect()  # compiles a function of its own, once a process
    before = programmed.torch_names.counts()
    saw = programmed.warm_and_compare(programmed.Nested, root, store=store, engine=engine)
    return saw, programmed.torch_names.counts().since(before).frames


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_after_a_change_is_right_or_refused(name: str, called: dict[str, Called]) -> None:
    """Never a wrong number: what a program does not fit is refused with the reason."""
    expected = CHANGES[name][2]
    assert called[name].right
    assert (called[name].said == "") == (expected == ""), called[name].said
    assert expected in called[name].said


@pytest.mark.parametrize("name", ["by position", "by name"])
def test_arguments_by_position_and_by_name_are_one_program(
    name: str, places: dict[str, str]
) -> None:
    """Whichever way it was warmed."""
    assert places[name] == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inference", ""),
        ("autocast", "autocast cpu is torch.bfloat16, was off"),
        ("default dtype", "default dtype is torch.float64, was torch.float32"),
        ("another shape", "x.shape[0] is 3, planned is 2"),
        ("another dtype", "x.dtype is float64, planned is float32"),
        ("strides", "x.stride"),
        ("wants a gradient", "x.requires_grad is True, planned is False"),
    ],
)
def test_a_call_in_other_surroundings_is_refused(
    name: str, words: str, places: dict[str, str]
) -> None:
    """A program belongs to the grad mode, autocast, dtypes, strides it was compiled for."""
    assert places[name]
    assert words in places[name]


def test_evaluation_takes_the_program_of_evaluation(places: dict[str, str]) -> None:
    """Planned for both phases; which one it is, grad mode says."""
    assert places["no_grad"] == ""


REFUSED = {
    "Breaking": "graph_break",
    "Deciding": "Data-dependent branching",
    "Writing": "changes its inputs in place",
    "hooked": "Product has hooks",
    "hooked_inside": "'first' (Linear) has hooks",
    "patched": "a forward of its own",
    "compiled_before": "it was compiled before",
    "distributed": "DistributedDataParallel is a wrapper for distributed",
}
"""Models, and why they go by trace."""
TAKEN = ("Counting", "Custom", "parametrized", "Frozen", "Decorated", "Product")
"""Buffers that count, custom autograd functions, weights computed at every use, a decorated forward."""


@pytest.fixture(scope="module")
def compared(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saw]:
    """All of them, warmed and compared with themselves uncompiled."""
    folder = tmp_path_factory.mktemp("compared")
    return fresh.call(programmed.warm_and_compare_all, [*REFUSED, *TAKEN], folder)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_program_goes_by_trace(compared: dict[str, Saw], name: str) -> None:
    """With the reason in the report, and the right numbers."""
    saw, reason = compared[name], REFUSED[name]
    assert saw.right
    assert {row.engine for row in saw.report.targets} == {"trace"}
    assert any(reason in trouble for trouble in saw.report.gave_up), saw.report.gave_up
    assert all(reason in row.notes[0] for row in saw.report.targets), saw.report.targets


def test_a_sharded_model_is_no_program(fresh: Template) -> None:
    """Its hooks, and parameters that are no plain tensors."""
    assert "FSDP" in fresh.call(programmed.why_not_sharded)


@pytest.mark.parametrize("name", TAKEN)
def test_unusual_models_that_are_programs(compared: dict[str, Saw], name: str) -> None:
    """As right as any."""
    assert compared[name].right
    assert {row.engine for row in compared[name].report.targets} == {"program"}


def test_auto_says_why_only_in_its_rows(fresh: Template, tmp_path: Path) -> None:
    """Nobody asked for a program."""
    saw = fresh.call(_auto, tmp_path)
    assert saw.report.gave_up == ()
    assert all("graph_break" in row.notes[0] for row in saw.report.targets)


def _auto(root: Path) -> Saw:
    return programmed.warm_and_compare(programmed.Breaking, root, engine="auto")


def test_a_program_of_another_model_is_not_taken(
    fresh: Template, root: Path, tmp_path: Path
) -> None:
    """Same shapes, sources and fingerprint, but another number in it: FingerprintMismatch."""
    store = tmp_path / "store"
    fresh.call(_publish_scaled, tmp_path / "theirs", store)
    said, right, gave_up = fresh.call(
        programmed.mismatch, programmed.scaled_twice, tmp_path / "ours", store
    )
    assert "self.scale = float 1.0, here it is float 2.0" in said
    assert "['self.scale']" in said
    assert right
    assert "self.scale = float 1.0" in gave_up


def _publish_scaled(root: Path, store: Path) -> None:
    programmed.make_warm(programmed.Scaled(), root, store=store).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (programmed.of_another_torch, "torch = 2.99.0 0123456"),
        (programmed.of_other_sources, "source.workloads = 0"),
        (programmed.of_other_hardware, "hardware = NVIDIA B200 sm_100"),
    ],
)
def test_a_program_made_elsewhere_is_compiled_anew(
    fresh: Template, published: Path, tmp_path: Path, change: Callable[[Header], Header], words: str
) -> None:
    """Another torch build, an edited source, another GPU: told, and mended for the next start."""
    root = tmp_path / "root"
    shutil.copytree(published, root)
    fresh.call(programmed.change_programs, root, change)
    saw = fresh.call(programmed.warm_and_compare, programmed.Product, root)
    assert saw.right
    assert {(row.status, row.engine) for row in saw.report.targets} == {("compiled", "program")}
    assert all(words in trouble for trouble in saw.report.gave_up)
    assert len(saw.report.gave_up) == 2
    again = fresh.call(programmed.warm_and_compare, programmed.Product, root)
    assert again.report.gave_up == ()
    assert {row.status for row in again.report.targets} == {"local"}


@pytest.fixture(scope="module")
def published(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the programs of one model."""
    root = tmp_path_factory.mktemp("published") / "root"
    fresh.call(programmed.warm_and_compare, programmed.Product, root)
    return root


def test_a_truncated_program_is_moved_aside_and_made_again(
    fresh: Template, published: Path, tmp_path: Path
) -> None:
    """Its digest tells, before torch reads a byte of it."""
    root = tmp_path / "root"
    shutil.copytree(published, root)
    for path in root.glob("programs/*.program"):
        path.write_bytes(path.read_bytes()[:-100])
    saw = fresh.call(programmed.warm_and_compare, programmed.Product, root)
    assert saw.right
    assert {row.engine for row in saw.report.targets} == {"program"}
    assert all("is damaged in the cache root" in trouble for trouble in saw.report.gave_up)


def test_a_new_shape_is_compiled_alone_as_a_program(fresh: Template, tmp_path: Path) -> None:
    """on_miss="serialize": the worker goes on with its program, found by look-up."""
    engines, programs, right = fresh.call(programmed.serialized, tmp_path)
    assert engines == ["program"] * 3
    assert programs == 3
    assert right


def test_two_replicas_have_programs_each(fresh: Template, root: Path) -> None:
    """One file, two loads, each with its own parameters."""
    engines, right = fresh.call(programmed.two_replicas, root)
    assert engines == ["program", "program"]
    assert right


def test_copies_of_a_model_are_plain_models(fresh: Template, root: Path) -> None:
    """As of any module that was compiled in place."""
    assert fresh.call(programmed.copied, root)


def test_engine_trace_takes_a_model_over(fresh: Template, root: Path) -> None:
    """Its programs are gone then."""
    assert fresh.call(programmed.trace_after_program, root) == ({"trace"}, True)


def test_traces_in_another_thread_disturb_no_program(fresh: Template, root: Path) -> None:
    """126024, 118260: compiled calls are refused and modules cannot be called; programs can."""
    calls, errors = fresh.call(programmed.calls_while_tracing, root, 400)
    assert errors == []
    assert calls == 400


@torch.no_grad()
def test_a_class_of_torch_keeps_its_call() -> None:
    """Only classes of users are called past nn.Module.__call__."""
    assert nn.Linear.__call__ is nn.Module.__call__


def test_a_graph_that_cannot_do_without_an_index_is_compiled_with_one(fresh: Template) -> None:
    """torch 2.14.1 cannot split some graphs of code that names none; every other error is what it is."""
    assert fresh.call(made_after, "conflict: current_device_default") == ("", [])
    error, _ = fresh.call(made_after, "this cannot be split", "nor this")
    assert "this cannot be split" in error
    error, left = fresh.call(made_after, "current_device", "current_device again", "never")
    assert "again" in error
    assert left == ["never"]
