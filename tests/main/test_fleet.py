"""Pods that start cold at once: real processes, roots of their own, one store."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from places import Cold, Place
from processes import Running, Template
from test_kill import assert_whole, store_records, until_said
from workloads import plan

COUNTS = list(range(2, 11))


def pods(fresh: Template, cold: Cold, place: Place, number: int, *more: object) -> list[Running]:
    """That many warm-ups of the place's plan and store, each on a root of its own."""
    started = []
    for name in range(number):
        pod = Place(place.folder / f"pod{name}")
        cold.seed(pod.root)
        words = (place.plan_file, "--device", "cpu", "--root", pod.root, "--store", place.store)
        started.append(fresh.begin("warm", *words, "--json", *more))
    return started


def test_three_cold_pods_compile_each_target_once(
    fresh: Template, cold: Cold, place: Place, tmp_path: Path
) -> None:
    """Every target compiled by one pod, primed in all; reports keep the order of the plan."""
    place.write(plan("product", COUNTS))
    ended = [pod.wait() for pod in pods(fresh, cold, place, 3)]
    assert [one.code for one in ended] == [0, 0, 0], ended[0].err
    keys = [target.key for target in place.plan.targets(["cpu"])]
    for rows in zip(*(one.json["targets"] for one in ended), strict=True):
        assert sorted(row["status"] for row in rows) == ["compiled", "restored", "restored"]
        assert sum(bool(row["evidence"]["misses"]) for row in rows) == 1
    for one in ended:
        assert [row["key"] for row in one.json["targets"]] == keys
        assert one.json["gave_up"] == []
    records = store_records(place.store)
    assert sorted(record.key for record in records) == sorted(keys)
    assert {record.generation for record in records} == {1}
    for name in range(3):
        pod = Place(place.folder / f"pod{name}")
        assert_whole(pod, tmp_path / "scratch")


@pytest.mark.slow
def test_pods_with_a_kernel_in_common(fresh: Template, place: Place) -> None:
    """C++ libraries may name the root they were built in; what a pod restores still fits what it made."""
    place.write(plan("two_layer", [2, 3], ("eval",)))
    started = []
    for name in range(2):
        words = ("--root", place.folder / f"pod{name}" / "root", "--store", place.store, "--json")
        started.append(fresh.begin("warm", place.plan_file, "--device", "cpu", *words))
    ended = [pod.wait() for pod in started]
    for rows in zip(*(one.json["targets"] for one in ended), strict=True):
        assert sorted(row["status"] for row in rows) == ["compiled", "restored"], ended[0].err
    assert [one.json["gave_up"] for one in ended] == [[], []]
    roots = [place.folder / f"pod{name}" / "root" for name in range(2)]
    libraries = [
        {p.relative_to(root): p.read_bytes() for p in root.rglob("*.so")} for root in roots
    ]
    shared = libraries[0].keys() & libraries[1].keys()
    named = any(str(roots[0]).encode() in code for code in libraries[0].values())
    assert shared
    assert any(libraries[0][name] != libraries[1][name] for name in shared) or not named
    proof = fresh.command("verify", place.plan_file, "--device", "cpu", "--root", roots[1])
    assert proof.code == 0, proof.err


def test_without_sharing_each_compiles_all(fresh: Template, cold: Cold, place: Place) -> None:
    """--no-share writes no claims and waits for nobody."""
    place.write(plan("product", [2, 3]))
    for pod in pods(fresh, cold, place, 1, "--no-share"):
        assert pod.wait().json["targets"][0]["status"] == "compiled"
    assert not list(place.store.glob("v1/*/claims"))


def test_a_killed_warm_up_goes_on_at_once(fresh: Template, cold: Cold, place: Place) -> None:
    """On its own root nobody waits for the lease of the dead: its lock was free."""
    place.write(plan("product", list(range(2, 12))))
    (pod,) = pods(fresh, cold, place, 1)
    until_said(pod, "] compiled")
    pod.kill(signal.SIGKILL)
    pod.wait()
    (again,) = pods(fresh, cold, place, 1)
    ended = again.wait()
    assert ended.code == 0, ended.err
    assert "waiting" not in ended.err
    assert ended.json["gave_up"] == []
