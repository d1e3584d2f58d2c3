"""Where targets come from, and what is survived: other processes, sick stores, targets that fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mounts import read_only
from places import Cold, Place
from processes import Template
from training import warm_and_train
from workloads import PassedBy, plan, rows

from compilecache.artifact import Record
from compilecache.ensure import ensure_warm
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    CompileFailed,
    StoreUnavailable,
    UnexpectedCompile,
)
from compilecache.fingerprint import Fingerprint
from compilecache.report import Report
from compilecache.store import ArtifactStore

NOBODY = "http://127.0.0.1:9"
"""An address where nothing answers."""


def warm(place: Place, *more: object) -> tuple[object, ...]:
    """Words of a warm-up with a report to read."""
    return ("warm", *place.words, "--json", *more)


def statuses(ended: object) -> list[str]:
    """Of each target."""
    return [row["status"] for row in ended.json["targets"]]  # type: ignore[attr-defined]


def records_of(store: Path) -> list[Record]:
    """Every record of a store."""
    return [Record.parse(path.read_bytes()) for path in sorted(store.glob("v1/*/artifacts/*/*"))]


def pack_names(store: Path) -> set[str]:
    """The packs of a store, by digest."""
    return {path.name.partition(".")[0] for path in store.glob("v1/*/packs/*")}


class _Deaf(ArtifactStore):
    """A store that fails the test when it is asked anything."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return "deaf://"

    def __getattribute__(self, name: str) -> object:
        if name in ("url", "asked", "__class__", "__init__"):
            return object.__getattribute__(self, name)
        raise AssertionError(f"the store was asked for '{name}'")


def _without_a_store(place: Place) -> Report:
    from training import model_of

    return ensure_warm(
        model_of("TwoLayer"), place.plan, workload="workloads:two_layer", store=_Deaf(),
        root=place.root, strict=True,
    ).report  # fmt: skip


def test_what_is_local_is_found_without_the_store(fresh: Template, warmed: Place) -> None:
    """A second process on the same root needs no lock, no store and no compile."""
    report = fresh.call(_without_a_store, warmed)
    assert report.count("local") == 3
    assert report.compiles == 0
    assert all(row.evidence and row.evidence.outcome == "hit" for row in report.targets)


def _down(place: Place, strict: bool) -> Report:
    store = ArtifactStore.open(
        "s3://bucket/cache",
        budget_seconds=1,
        storage_options={"endpoint_url": NOBODY, "key": "k", "secret": "s"},
    )
    return warm_and_train(
        plan("product", [2]), place.root, store, counts=[2], model="Product", strict=strict
    ).report


def _down_strict(place: Place) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        _down(place, strict=True)
    return str(caught.value)


def test_a_store_that_is_down(fresh: Template, seeded: Place) -> None:
    """Warning and cold compile; strict raises; the next run publishes what was compiled meanwhile."""
    report = fresh.call(_down, seeded, strict=False)
    assert report.count("compiled") == 1
    assert report.warm
    assert not report.targets[0].published
    assert any("s3://bucket/cache" in text for text in report.gave_up)
    seeded.write(plan("product", [2]))
    later = fresh.command(*warm(seeded))
    assert (later.code, statuses(later)) == (0, ["local"]), later.err
    assert [record.key for record in records_of(seeded.store)] == [report.targets[0].key]
    again = fresh.command(
        "restore", *seeded.words[:-3], seeded.folder / "other", "--store", seeded.store
    )
    assert again.code == 0, again.err
    assert "s3://bucket/cache" in fresh.call(_down_strict, Place(seeded.folder / "strict"))


def _garbage(store: Path) -> None:
    for path in store.rglob("*"):
        if path.is_file() and "claims" not in path.parts:  # one that cannot be read is waited for
            path.write_bytes(b"<html>Sign in to the network</html>")


def _truncated_packs(store: Path) -> None:
    for path in store.glob("v1/*/packs/*"):
        path.write_bytes(path.read_bytes()[:-100])


def _newer_format(store: Path) -> None:
    for path in store.glob("v1/*/artifacts/*/*"):
        path.write_text(path.read_text().replace('"format":1', '"format":2'))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "garbage": _garbage,
    "truncated packs": _truncated_packs,
    "another format": _newer_format,
}


@pytest.fixture(scope="session")
def published(fresh: Template, cold: Cold, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A root and a store with two fast targets."""
    place = Place(tmp_path_factory.mktemp("published"))
    cold.seed(place.root)
    place.write(plan("product", [2, 3]))
    assert fresh.command(*warm(place)).code == 0
    return place


@pytest.fixture
def small(published: Place, tmp_path: Path) -> Place:
    """A private copy of those."""
    shutil.copytree(published.folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_said_and_survived(fresh: Template, small: Place, damage: str) -> None:
    """Nothing of it reaches the root: the targets compile and are published above the bad ones."""
    shutil.rmtree(small.root)
    DAMAGES[damage](small.store)
    refused = fresh.command(*warm(small, "--strict"))
    assert refused.code == 4, refused.err
    assert "Traceback" not in refused.err
    mended = fresh.command(*warm(small))
    assert mended.code == 0, mended.err
    assert statuses(mended) == ["compiled", "compiled"]
    assert mended.json["gave_up"]
    shutil.rmtree(small.root)
    restored = fresh.command(*warm(small))
    assert statuses(restored) == ["restored", "restored"], restored.err


def test_a_read_only_store(fresh: Template, small: Place) -> None:
    """What it has is restored; what it cannot take stays here, and the report says so."""
    shutil.rmtree(small.root)
    small.write(plan("product", [2, 3, 4]))
    with read_only(small.store):
        ended = fresh.command(*warm(small))
    assert ended.code == 0, ended.err
    assert statuses(ended) == ["restored", "restored", "compiled"]
    assert any("read-only" in text or "permitted" in text for text in ended.json["gave_up"])


def test_one_failing_target_does_not_stop_the_others(fresh: Template, seeded: Place) -> None:
    """jax#12582: a failing bucket killed the run; here it is one row of the report, and exit code 3."""
    seeded.write(plan("fragile", [2, 3, 4]))
    ended = fresh.command(*warm(seeded))
    assert ended.code == 3
    assert statuses(ended) == ["compiled", "failed", "compiled"]
    assert "[3,8]" in ended.json["targets"][1]["error"]
    assert [record.key for record in records_of(seeded.store)] == sorted(
        row["key"] for row in ended.json["targets"] if row["status"] == "compiled"
    )
    strict = fresh.command(*warm(seeded, "--strict"))
    assert strict.code == 1
    assert strict.err.splitlines()[-1].startswith("error: forward train x=[3,8] on cpu failed")


def _passed_by(folder: Path, strict: bool) -> Report | str:
    try:
        return ensure_warm(
            PassedBy(), [rows(2)], store=folder / "store", root=folder / "root", strict=strict
        ).report
    except UnexpectedCompile as error:
        return f"{error.target}: {error}"


def test_a_graph_that_torch_never_caches(fresh: Template, seeded: Place) -> None:
    """191106: bypass is a class of its own, on every start; strict fails naming the target."""
    for _ in range(2):
        report = fresh.call(_passed_by, seeded.folder, strict=False)
        assert isinstance(report, Report)
        assert report.targets[0].evidence is not None
        assert report.targets[0].evidence.outcome == "bypass"
        assert "not wholly cached" in report.gave_up[0]
    refused = fresh.call(_passed_by, seeded.folder, strict=True)
    assert isinstance(refused, str)
    assert "forward train x=[2,8] on cpu" in refused


def test_keys_that_differ_from_process_to_process(fresh: Template, seeded: Place) -> None:
    """131921, modelexpress#560: there, and not used. The proof fails, and the next start's report says so."""
    seeded.write(plan("flaky", [2], ("eval",)))
    words = seeded.words
    assert fresh.command("warm", *words, env={"FLAKY_COLUMNS": "3"}).code == 0
    later = {"FLAKY_COLUMNS": "5"}
    proof = fresh.command("verify", *words[:-2], "--json", env=later)
    assert proof.code == 3
    assert not proof.json["targets"][0]["warm"]
    seen = fresh.command("warm", *words, "--json", env=later)
    (row,) = seen.json["targets"]
    assert (row["status"], row["evidence"]["misses"] > 0) == ("compiled", True)
    assert any("compiled all the same" in text for text in seen.json["gave_up"])


def test_every_record_lists_all_its_target_needs(fresh: Template, small: Place) -> None:
    """The second target shares files with the first; restored alone it still compiles nothing (vllm-rbln#805)."""
    shared = set.intersection(
        *({entry.path for entry in record.files} for record in records_of(small.store))
    )
    assert any(path.endswith(".so") for path in shared)
    only = small.plan.model_copy(update={"specs": small.plan.specs[1:]})
    small.write(only)
    shutil.rmtree(small.root)
    ended = fresh.command(*warm(small, "--strict"))
    assert statuses(ended) == ["restored"], ended.err
    assert ended.json["targets"][0]["evidence"]["launches"] == 0
    assert {entry.pack for record in records_of(small.store) for entry in record.files} == (
        pack_names(small.store)
    )


PROBING = {"TORCHINDUCTOR_VEC_ISA_OK": None}
"""Lets torch find out the CPU's vector instructions as it does for users: by compiling."""


def _after_other_work(place: Place) -> Report:
    import torch

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place.folder / "elsewhere")
    torch.compile(lambda x: x.sin() + 1, dynamic=False)(torch.ones(3))
    return warm_and_train(
        plan("two_layer", [2], ("eval",)), place.root, place.store, counts=[], strict=True
    ).report


def test_the_libraries_that_ask_the_cpu_travel_along(fresh: Template, place: Place) -> None:
    """torch asks once per process, maybe before the warm-up and into another folder."""
    first = fresh.call(_after_other_work, place, env=PROBING)
    assert first.count("compiled") == 1
    shutil.rmtree(place.root)
    second = fresh.call(
        warm_and_train, plan("two_layer", [2], ("eval",)), place.root, place.store,
        counts=[], strict=True, env=PROBING,
    ).report  # fmt: skip
    assert second.count("restored") == 1
    assert second.compiles == 0


def test_a_forward_only_cache_is_no_cache_for_training(fresh: Template, seeded: Place) -> None:
    """141790: the cache was warm for evaluation, and every backward compiled again."""
    seeded.write(plan("product", [2], ("eval",)))
    assert fresh.command(*warm(seeded)).code == 0
    seeded.write(plan("product", [2]))
    proven = fresh.command("verify", *seeded.words[:-2], "--json")
    assert proven.code == 3
    assert proven.json["targets"][0]["evidence"]["outcome"] == "miss"


def test_a_copied_cache_that_misses_says_why(fresh: Template, small: Place) -> None:
    """144859: two environments differ in one component, and the difference names it."""
    other = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    here = fresh.command("fingerprint", small.plan_file, "--device", "cpu", "--json")
    there = fresh.command("fingerprint", small.plan_file, "--device", "cpu", "--json", env=other)
    mine, theirs = (Fingerprint(ended.json["components"]) for ended in (here, there))
    assert mine.diff(theirs) == {"env.TORCHINDUCTOR_MAX_AUTOTUNE": ("1", "absent")}


def test_damage_in_the_root_is_moved_aside_and_mended(fresh: Template, small: Place) -> None:
    """triton#8923: an empty entry; the store's whole one takes its place and nothing is deleted (pytorch#184096)."""
    entry = next(small.root.glob("aotautograd/*/*"))
    whole = entry.read_bytes()
    entry.write_bytes(b"")
    ended = fresh.command(*warm(small))
    assert ended.code == 0, ended.err
    assert statuses(ended).count("restored") == 1
    assert "moved aside" in ended.json["gave_up"][0]
    assert entry.read_bytes() == whole
    aside = [path.name for path in (small.root / ".compilecache" / "damaged").iterdir()]
    assert len(aside) == 1
    assert aside[0].endswith(entry.name)


def test_a_conflict_with_the_root_is_said_and_nothing_overwritten(
    fresh: Template, small: Place
) -> None:
    """Files that somebody else made under the same names stay; the target is not half there."""
    shutil.rmtree(small.root / ".compilecache")
    entry = next(small.root.glob("aotautograd/*/*"))
    entry.write_bytes(b"mine")
    ended = fresh.command("restore", *small.words, "--json")
    assert ended.code == 4
    assert entry.read_bytes() == b"mine"
    assert len(ended.json["missing"]) == 1
    assert str(entry) in ended.json["faults"][0]


def test_strict_raises_what_it_is(fresh: Template, small: Place) -> None:
    """A damaged pack is ChecksumMismatch, a failing target CompileFailed: both CompileCacheError."""
    _truncated_packs(small.store)
    shutil.rmtree(small.root)
    assert fresh.call(_strict_kind, small, "Product") == ChecksumMismatch.__name__
    assert fresh.call(_strict_kind, small, "Fragile") == CompileFailed.__name__


def _strict_kind(place: Place, model: str) -> str:
    try:
        warm_and_train(
            plan(model.lower(), [2, 3]), place.root, place.store, model=model, strict=True
        )
    except CompileCacheError as error:
        return type(error).__name__
    return "nothing"
