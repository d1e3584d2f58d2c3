"""Programs that nobody has run on their GPU: what an image has of them, and what the store has since."""

from __future__ import annotations

from pathlib import Path

import pytest
from pods import MARK

from compilecache.artifact import Record
from compilecache.cachedir import CacheDir
from compilecache.engines.programfile import Header, read_header, sealed, write_program
from compilecache.errors import StoreUnavailable
from compilecache.exchange import Exchange
from compilecache.gpuprofile import GpuProfile
from compilecache.restoring import restore_plan
from compilecache.shapes import CompileTarget, InputSpec, ShapePlan, plan_of
from compilecache.store import ArtifactStore

SPECS = (InputSpec(dims={"seq_len": 128}), InputSpec(dims={"seq_len": 256}))
ONE, TWO = (CompileTarget(spec, "cuda:0") for spec in SPECS)
H200 = GpuProfile.load("h200")


def plan() -> ShapePlan:
    """Both of them, by programs."""
    return plan_of(SPECS, workload="nobody:asks").model_copy(update={"engine": "program"})


def opened(root: Path) -> CacheDir:
    """A cache root, made."""
    cache = CacheDir(root)
    cache.prepare()
    return cache


def program(root: Path, target: CompileTarget, *, met: bool, data: bytes = b"code") -> str:
    """Writes one."""
    facts = {"hardware": H200.name, "torch": "2", "parameters": "none"}
    nothing: dict[str, object] = {"sources": {}, "imports": {}, "state": {}, "conditions": ()}
    content = {**facts, **nothing, **sealed(data), "profile": None if met else H200}
    header = Header.model_validate({"spec": target.spec, "device": target.device, **content})
    return write_program(root, header, data)


def published(
    folder: Path, store: ArtifactStore, *targets: CompileTarget, met: bool, data: bytes = b"code"
) -> list[Record]:
    """What a host that has made these programs publishes."""
    cache = opened(folder)
    exchange = Exchange(cache, store, MARK, [target.key for target in targets])
    return [
        exchange.publish(one, [program(cache.root, one, met=met, data=data)], None)
        for one in targets
    ]


@pytest.fixture
def image(tmp_path: Path) -> ArtifactStore:
    """Both targets as they were compiled without the GPU."""
    store = ArtifactStore.open(tmp_path / "image")
    published(tmp_path / "ci", store, ONE, TWO, met=False)
    return store


def pulled(root: Path, store: ArtifactStore | None, image: ArtifactStore) -> dict[str, bool]:
    """Key of each target in a root that was filled → whether its program has met its GPU."""
    cache, told = opened(root), list[str]()
    done = restore_plan(plan(), ["cuda:0"], cache, store, told.append, baked=image, mark=MARK)
    assert (done.missing, done.faults) == ((), ())
    records = cache.records(MARK.digest)
    return {
        key: read_header(cache.root / record.files[0].path).profile is None
        for key, record in records.items()
    }


def test_what_has_met_its_gpu_is_taken_from_the_store(tmp_path: Path, image: ArtifactStore) -> None:
    """An image cannot be written: the second container begins where the first has ended."""
    store = ArtifactStore.open(tmp_path / "store")
    published(tmp_path / "first", store, ONE, met=True)
    assert pulled(tmp_path / "root", store, image) == {ONE.key: True, TWO.key: False}
    assert pulled(tmp_path / "root", store, image) == {ONE.key: True, TWO.key: False}


def test_a_root_that_stays_learns_what_others_have_settled(
    tmp_path: Path, image: ArtifactStore
) -> None:
    """It was complete before; the next pull asks the store for what nobody had run then."""
    store = ArtifactStore.open(tmp_path / "store")
    assert pulled(tmp_path / "root", store, image) == {ONE.key: False, TWO.key: False}
    published(tmp_path / "first", store, ONE, TWO, met=True)
    assert pulled(tmp_path / "root", store, image) == {ONE.key: True, TWO.key: True}


def test_without_a_store_an_image_serves_as_it_is(tmp_path: Path, image: ArtifactStore) -> None:
    """Whoever starts from it meets the GPU himself."""
    assert pulled(tmp_path / "root", None, image) == {ONE.key: False, TWO.key: False}


def test_a_settled_program_that_is_damaged_costs_nothing(
    tmp_path: Path, image: ArtifactStore
) -> None:
    """What the image has stays in use, and the fault is told."""
    store = ArtifactStore.open(tmp_path / "store")
    (record,) = published(tmp_path / "first", store, ONE, met=True)
    assert record.pack is not None
    (pack,) = (tmp_path / "store").rglob(f"{record.pack.sha256}*")
    pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    cache = opened(tmp_path / "root")
    done = restore_plan(plan(), ["cuda:0"], cache, store, lambda _: None, baked=image, mark=MARK)
    assert (done.missing, done.damaged) == ((), True)
    exchange = Exchange(cache, None, MARK, [ONE.key, TWO.key])
    exchange.look()
    assert exchange.missing == frozenset()


class Silent(ArtifactStore):
    """Never answers."""

    def latest(self, fingerprint: str, keys: object = None) -> object:  # type: ignore[override]
        raise StoreUnavailable("it is silent", next_step="Wait")


def test_a_store_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, image: ArtifactStore
) -> None:
    """An image is there so that a start needs no store: it is a word of warning."""
    silent = Silent.open(tmp_path / "store")
    assert pulled(tmp_path / "root", silent, image) == {ONE.key: False, TWO.key: False}
