"""``verify`` and adopted directories: what a fresh process says of a cache, and what counters do not."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from places import Place
from processes import Template
from workloads import plan

from compilecache.adopt import adopt_plan, cache_files
from compilecache.errors import CompileFailed, PlanError
from compilecache.proof import Request, prove, run_fresh
from compilecache.shapes import ShapePlan
from compilecache.store import ArtifactStore


def listing(root: Path) -> dict[str, str]:
    """Every file below the root with its digest."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def kernels(root: Path) -> list[Path]:
    """The compiled libraries of the model; others ask the CPU what it can."""
    return sorted(root.glob("??/*.main.so"))


def test_a_warm_root_is_proven_and_left_as_it_is(fresh: Template, warmed: Place) -> None:
    """Every target warm in a fresh process; not one file of the root differs afterwards."""
    before = listing(warmed.root)
    ended = fresh.command("verify", *warmed.words[:-2], "--json")
    assert ended.code == 0, ended.err
    told = ended.json
    assert set(told) >= {"warm", "fingerprint", "damaged", "targets"}
    assert told["warm"] is True
    assert told["damaged"] == []
    assert [row["warm"] for row in told["targets"]] == [True] * 3
    assert all(row["evidence"]["hits"] and not row["error"] for row in told["targets"])
    assert listing(warmed.root) == before


def test_counters_say_hit_while_a_compiler_runs(fresh: Template, warmed: Place) -> None:
    """Every kernel removed, and our records with them: torch counts hits only, the proof says no."""
    shutil.rmtree(warmed.root / ".compilecache")
    for library in kernels(warmed.root):
        library.unlink()
    before = listing(warmed.root)
    ended = fresh.command("verify", *warmed.words[:-2], "--json")
    assert ended.code == 3, ended.err
    seen = ended.json["targets"][0]["evidence"]
    assert (seen["misses"], seen["bypasses"]) == (0, 0)
    assert seen["hits"] > 0
    assert seen["launches"] > 0
    assert [row["warm"] for row in ended.json["targets"]].count(False) >= 2
    after = {
        name: text for name, text in listing(warmed.root).items() if ".compilecache" not in name
    }
    assert after == before


def test_every_damaged_file_is_named(fresh: Template, warmed: Place) -> None:
    """One byte flipped in a library, and two entries cut short: digests find what torch does not."""
    library = kernels(warmed.root)[0]
    data = bytearray(library.read_bytes())
    data[-64] ^= 1
    library.write_bytes(bytes(data))
    entries = [next(warmed.root.glob(pattern)) for pattern in ("fxgraph/*/*/*", "aotautograd/*/*")]
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    ended = fresh.command("verify", *warmed.words[:-2], "--json")
    assert ended.code == 4, ended.err
    assert ended.json["warm"] is False
    for path in (library, *entries):
        name = str(path.relative_to(warmed.root))
        assert any(fault.startswith(name) for fault in ended.json["damaged"])


def test_a_directory_adopted_whole_serves_a_plan_later(fresh: Template, warmed: Place) -> None:
    """The incident's 353 MB, saved as they were: restored whole by whoever misses something."""
    found = warmed.folder / "torchinductor_somebody"
    warmed.root.rename(found)
    shutil.rmtree(found / ".compilecache")
    shutil.rmtree(warmed.store)
    (found / "locks" / "left.lock").touch()
    (found / "fxgraph" / ".12.34.tmp").write_bytes(b"unfinished")
    before = listing(found)
    saved = fresh.command(
        "publish", "--from", found, "--device", "cpu", "--store", warmed.store, "--json"
    )
    assert saved.code == 0, saved.err
    assert saved.json["published"] == ["adopted"]
    assert saved.json["files"] == len(before) - len(
        [name for name in before if "lock" in name or name.endswith(".tmp")]
    )
    assert listing(found) == before
    for status in ("local", "restored"):
        ended = fresh.command("warm", *warmed.words, "--json")
        assert ended.code == 0, ended.err
        assert [row["status"] for row in ended.json["targets"]] == [status] * 3
        assert all(row["evidence"]["launches"] == 0 for row in ended.json["targets"])
        shutil.rmtree(warmed.root)


def test_a_directory_adopted_with_a_plan_is_proven_first(fresh: Template, warmed: Place) -> None:
    """Only targets that compiled nothing in a fresh process are published; the others are named."""
    found = warmed.folder / "torchinductor_somebody"
    warmed.root.rename(found)
    shutil.rmtree(found / ".compilecache")
    shutil.rmtree(warmed.store)
    known = warmed.plan
    warmed.write(known.model_copy(update={"specs": (*known.specs, *plan("two_layer", [5]).specs)}))
    before = listing(found)
    saved = fresh.command(
        "publish", warmed.plan_file, "--from", found, "--device", "cpu", "--store", warmed.store,
        "--json",
    )  # fmt: skip
    assert saved.code == 3, saved.err
    assert len(saved.json["published"]) == 3
    assert len(saved.json["missing"]) == 1
    assert "[5,8]" in saved.json["missing"][0]
    assert listing(found) == before
    warmed.write(known)
    restored = fresh.command("restore", *warmed.words, "--json")
    assert restored.code == 0, restored.err
    assert restored.json["restored"] == 3
    ended = fresh.command("warm", *warmed.words, "--strict", "--json")
    assert [row["evidence"]["launches"] for row in ended.json["targets"]] == [0, 0, 0]


def test_a_directory_that_is_no_cache(tmp_path: Path) -> None:
    """Nothing to adopt: the error names the folder."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "one.lock").touch()
    with pytest.raises(PlanError, match="holds no compile cache"):
        cache_files(tmp_path)
    store = ArtifactStore.open(tmp_path / "store")
    with pytest.raises(PlanError, match="holds no compile cache"):
        adopt_plan(tmp_path / "locks", store, plan("product", [2]), ["cpu"])


def _prove(place: Place, name: str, timeout: float | None) -> str:
    (place.root / "ab").mkdir(parents=True)
    (place.root / "ab" / "file").touch()
    specs = plan("product", [2])
    try:
        prove(specs.model_copy(update={"workload": name}), ["cpu"], place.root, timeout=timeout)
    except CompileFailed as error:
        return str(error)
    return "nothing"


def test_a_fresh_process_that_dies(fresh: Template, place: Place) -> None:
    """One error that says how it ended, and nothing is left in the root."""
    assert "ended with 7" in fresh.call(_prove, place, "dying:workload", None)
    assert list(listing(place.root)) == ["ab/file"]


def test_an_empty_root_is_said_to_be_empty(fresh: Template, place: Place) -> None:
    """At once, with exit code 3, instead of compiling everything to find out."""
    place.write(plan("product", [2]))
    ended = fresh.command("verify", place.plan_file, "--root", place.root, "--device", "cpu")
    assert ended.code == 3
    assert "is empty" in ended.err


def test_a_fresh_process_that_hangs(fresh: Template, place: Place) -> None:
    """189290: it has a deadline (pytorch#162199)."""
    assert "was ended after 1 s" in fresh.call(_prove, place, "hanging:workload", 1.0)


def _unknown(place: Place) -> str:
    place.root.mkdir()
    request = Request(
        plan=ShapePlan.model_copy(plan("product", [2]), update={"workload": "nowhere:at_all"}),
        devices=["cpu"],
        root=str(place.root),
    )
    try:
        run_fresh(request)
    except PlanError as error:
        return str(error)
    return "nothing"


def test_what_a_fresh_process_refuses_is_told(fresh: Template, place: Place) -> None:
    """Its error comes back as one, with the reason in it."""
    assert "no module named 'nowhere'" in fresh.call(_unknown, place)
