"""Known-good states: what a tag names stays, comes back exactly, and is believed only when signed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from aged import AgedStorage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import harvest, plant
from stores import Place

from compilecache.budget import Budget
from compilecache.cachedir import CacheDir
from compilecache.changes import Change, Undoing
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    PlanError,
    StoreUnavailable,
    UntrustedArtifact,
)
from compilecache.exchange import Exchange
from compilecache.fingerprint import Fingerprint
from compilecache.inspection import inspect_store
from compilecache.keeping import DAY
from compilecache.knowngood import Returned, restore_tag
from compilecache.packages import described
from compilecache.retention import Collection, Collector, Retention
from compilecache.shapes import CompileTarget, InputSpec, plan_of
from compilecache.signing import Keys, SignKey, load_sign_key, make_key
from compilecache.storage import LocalStorage
from compilecache.store import ArtifactStore
from compilecache.surroundings import variables
from compilecache.sweeps import Sweep
from compilecache.tagging import Used, Words, make_tag, tag_run
from compilecache.tags import LaterFormat, Surroundings, Tag, parse_entry, parse_name

MARK = Fingerprint({"workload": "test", "torch": "2.11.0", "source.compilecache.tags": "abc"})
SPECS = [InputSpec(dims={"seq_len": size}) for size in (64, 128)]
ONE, TWO = (CompileTarget(spec, "cpu") for spec in SPECS)
FIRST = {"ab/one.bin": b"first one", "fxgraph/ab/k/1": b"first entry"}
SECOND = {"ab/two.bin": b"second one", "fxgraph/ab/k/2": b"second entry"}


@dataclass(frozen=True)
class Scene:
    """A store that a test can age, and roots that publish to it."""

    folder: Path
    storage: AgedStorage
    keys: Keys = Keys()  # noqa: RUF009 - frozen

    def store(self, keys: Keys | None = None) -> ArtifactStore:
        """A client."""
        return ArtifactStore(self.storage, Budget("store", 5), keys or self.keys)

    def root(self, name: str) -> CacheDir:
        """A cache root."""
        cache = CacheDir(self.folder / name)
        cache.prepare()
        return cache

    def publish(
        self, root: str, files: Mapping[str, bytes], target: CompileTarget = ONE
    ) -> CacheDir:
        """Publishes a target's next generation from a root that has these files."""
        cache = self.root(root)
        plant(cache.root, files)
        Exchange(cache, self.store(), MARK, [target.key]).publish(target, list(files), None)
        return cache

    def tag(self, name: str, cache: CacheDir | None = None, **more: object) -> Tag:
        """Tags what a root uses."""
        return make_tag(name, MARK.digest, self.store(), cache, **more)  # type: ignore[arg-type]

    def restore(self, name: str, root: str, keys: Keys | None = None) -> Returned:
        """Brings a tag back into a root."""
        store, told = self.store(keys), []
        return restore_tag(store.tags.find(name).tag, self.root(root), store, told.append)

    def files(self, root: str) -> dict[str, bytes]:
        """What a root holds for torch."""
        found = harvest(self.folder / root)
        return {name: data for name, data in found.items() if not name.startswith(".compilecache")}

    def collect(self, **rule: object) -> Collection:
        """``gc --yes``."""
        return Collector(self.store(), Retention(**rule)).collect(time.time())  # type: ignore[arg-type]

    def object(self, name: str) -> Path:
        """A file of the store."""
        return self.folder / "store" / name


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """An empty store."""
    return Scene(tmp_path, AgedStorage(LocalStorage(tmp_path / "store")))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SignKey]:
    """Two keys."""
    folder = tmp_path_factory.mktemp("keys")
    for letter in "ab":
        make_key(folder / letter)
    return {letter: load_sign_key(folder / letter) for letter in "ab"}


def signing(key: SignKey) -> Keys:
    """Who signs with a key, and trusts it."""
    return Keys((key.public,), key)


# -- what a tag holds -----------------------------------------------------------------------------


def test_a_tag_holds_all_that_a_run_used(scene: Scene) -> None:
    """Fingerprint, records, plan, packages, sources, what was measured and said: written and read."""
    cache = scene.publish("root", FIRST)
    plan = plan_of([SPECS[0]], workload="some:workload")
    made = scene.tag("good", cache, plan=plan, words=Words(21500.5, "before the upgrade"))
    read = scene.store().tags.find("good").tag
    assert read == made
    assert (read.full_name, read.fingerprint, read.mark) == ("good@1", MARK.digest, MARK)
    assert [(r.key, r.generation, r.files) for r in read.records] == [(ONE.key, 1, 2)]
    assert (read.tokens_per_second, read.note, read.devices) == (
        21500.5,
        "before the upgrade",
        ("cpu",),
    )
    assert read.plan == plan
    around = read.surroundings
    assert around.packages["click"] and f"click=={around.packages['click']}\n" in around.constraints
    assert [source.module for source in around.sources] == ["compilecache.tags"]


def test_a_second_tag_of_a_name_leaves_the_first(scene: Scene) -> None:
    """Generations count up; the plain name means the youngest, NAME@1 the first."""
    cache = scene.publish("root", FIRST)
    scene.tag("good", cache, words=Words(1.0))
    scene.tag("good", cache, words=Words(2.0))
    tags = scene.store().tags
    assert tags.find("good").tag.tokens_per_second == 2.0
    assert tags.find("good@1").tag.tokens_per_second == 1.0
    assert [tag.full_name for tag in tags.shelf().tags] == ["good@1", "good@2"]


def test_a_tag_names_the_generation_that_the_root_uses(scene: Scene) -> None:
    """Somebody has published a younger one since: the run did not use it."""
    used = scene.publish("used", FIRST)
    scene.publish("younger", {**FIRST, "ab/one.bin": b"another"})
    assert [r.generation for r in scene.tag("good", used).records] == [1]
    assert [r.generation for r in scene.tag("latest").records] == [2]


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", ".x", "a b", "a\nb", "a" * 101, "a@", "a@0", "ä"]
)
def test_bad_names_are_refused(name: str) -> None:
    """Nothing that could leave the folder of tags, or that nobody could type."""
    with pytest.raises(PlanError, match="cannot name a tag"):
        parse_name(name)


def test_what_is_not_published_cannot_be_tagged(scene: Scene) -> None:
    """The message names the targets and what to do; no tag is left behind."""
    cache = scene.publish("root", FIRST)
    with pytest.raises(PlanError, match=rf"1 of 2 targets.*{TWO.key} is not published.*publish"):
        scene.tag("good", cache, keys=[ONE.key, TWO.key])
    with pytest.raises(PlanError, match="names a generation"):
        scene.tag("good@2", cache)
    with pytest.raises(PlanError, match="no rate"):
        scene.tag("good", cache, words=Words(float("nan")))
    assert scene.store().tags.shelf().entries == ()


def test_a_fingerprint_that_the_store_does_not_know_cannot_be_tagged(scene: Scene) -> None:
    """Without what the digest stands for nobody could say later what has changed."""
    cache = scene.publish("root", FIRST)
    place = scene.object(f"v1/{MARK.digest}/fingerprint.json")
    for content in (None, "{}", Fingerprint({"workload": "other"}).dump()):
        place.unlink(missing_ok=True)
        if content is not None:
            place.write_text(content)
        with pytest.raises(ChecksumMismatch, match=r"fingerprint\.json"):
            scene.tag("good", cache)


# -- bringing it back -----------------------------------------------------------------------------


def test_restore_brings_those_generations_and_no_younger_ones(scene: Scene) -> None:
    """A younger generation of the same target is in force; the tag's own comes back, byte for byte."""
    scene.publish("root", SECOND, TWO)
    scene.tag("good", scene.publish("root", FIRST))
    scene.publish("younger", {"ab/one.bin": b"changed", "fxgraph/ab/k/9": b"younger entry"})
    assert scene.store().latest(MARK.digest).records[ONE.key].generation == 2
    done = scene.restore("good", "fresh")
    assert (done.targets, done.local, done.restored, done.missing) == (2, 0, 2, ())
    assert scene.files("fresh") == FIRST | SECOND
    again = scene.restore("good", "fresh")
    assert (again.local, again.restored) == (2, 0)


def test_a_younger_generation_in_the_root_does_not_stand_in(scene: Scene) -> None:
    """The root's record is complete, and not the tag's: the tag's files come too."""
    scene.tag("good", scene.publish("old", FIRST))
    young = scene.publish("young", {"ab/other.bin": b"other", "fxgraph/ab/k/9": b"younger"})
    assert young.records(MARK.digest)[ONE.key].generation == 2
    done = scene.restore("good", "young")
    assert (done.local, done.restored) == (0, 1)
    assert scene.files("young").items() >= FIRST.items()
    assert young.records(MARK.digest)[ONE.key].generation == 1


def test_what_is_in_use_with_other_bytes_stays(scene: Scene) -> None:
    """The file is named, nothing is overwritten, and the tag is not there."""
    scene.tag("good", scene.publish("old", FIRST))
    scene.publish("young", {"ab/one.bin": b"in use"})
    done = scene.restore("good", "young")
    assert done.missing == (ONE.key,)
    assert "ab/one.bin" in done.faults[0] and "--root" in done.faults[0]
    assert scene.files("young") == {"ab/one.bin": b"in use"}


@pytest.mark.parametrize("what", ["record", "changed record", "pack"])
def test_what_is_gone_is_named_and_nothing_is_brought(scene: Scene, what: str) -> None:
    """The message has target and generation, or the pack; the other targets do not come either."""
    scene.publish("root", SECOND, TWO)
    scene.tag("good", scene.publish("root", FIRST))
    folder = scene.object(f"v1/{MARK.digest}")
    record = folder / "artifacts" / ONE.key / "1.json"
    pack = json.loads(record.read_bytes())["pack"]["sha256"]
    if what == "record":
        record.unlink()
        expected = f"{ONE.key}, generation 1, is missing"
    elif what == "changed record":
        record.write_bytes(record.read_bytes().replace(b'"evidence":null', b'"evidence": null'))
        expected = f"{ONE.key}, generation 1, has other bytes"
    else:
        (folder / "packs" / f"{pack}.tar.zst").unlink()
        expected = f"pack {pack[:12]} is missing"
    with pytest.raises(ChecksumMismatch, match=expected):
        scene.restore("good", "fresh")
    assert scene.files("fresh") == {}
    found = [f for f in inspect_store(scene.store()).damage if f.kind == "tag"]
    assert len(found) == 1
    assert expected in found[0].what and found[0].where == "tags/good/1.json"


def test_a_name_that_nothing_has_names_the_nearest(scene: Scene) -> None:
    """Also a generation that is not there; an empty store says how one is made."""
    with pytest.raises(PlanError, match="compilecache tag NAME"):
        scene.store().tags.find("good")
    scene.tag("good-h200", scene.publish("root", FIRST))
    with pytest.raises(PlanError, match="Did you mean good-h200"):
        scene.store().tags.find("goodh200")
    with pytest.raises(PlanError, match="Choose among good-h200@1"):
        scene.store().tags.find("good-h200@7")


def test_a_damaged_tag_is_passed_over_and_said(scene: Scene) -> None:
    """The older one of the name is used; asked for by its generation it is an error; fsck finds it."""
    cache = scene.publish("root", FIRST)
    scene.tag("good", cache)
    scene.tag("good", cache)
    place = scene.object("v1/tags/good/2.json")
    place.write_bytes(place.read_bytes()[:-20])
    found = scene.store().tags.find("good")
    assert found.tag.full_name == "good@1"
    assert "good@2" in found.passed_over[0]
    with pytest.raises(ChecksumMismatch, match="damaged"):
        scene.store().tags.find("good@2")
    (finding,) = inspect_store(scene.store()).damage
    assert (finding.kind, finding.where) == ("tag", "tags/good/2.json")


def test_a_tag_of_a_later_version_is_refused_by_its_format(scene: Scene) -> None:
    """It is no damage; whoever reads it hears that another version wrote it."""
    scene.tag("good", scene.publish("root", FIRST))
    place = scene.object("v1/tags/good/1.json")
    place.write_text(json.dumps({"format": 2, "anything": "else"}))
    with pytest.raises(
        LaterFormat, match=r"format 2, this version of compilecache reads 1.*Upgrade"
    ):
        scene.store().tags.find("good")
    done = inspect_store(scene.store())
    assert (done.damage, [f.kind for f in done.findings]) == ([], ["foreign"])


def test_a_tag_cannot_be_moved_to_another_name(scene: Scene) -> None:
    """A copy below another name, or another generation, is no tag."""
    scene.tag("good", scene.publish("root", FIRST))
    data = scene.object("v1/tags/good/1.json").read_bytes()
    plant(scene.object("v1/tags"), {"other/1.json": data, "good/2.json": data})
    with pytest.raises(ChecksumMismatch, match="names another place"):
        scene.store().tags.find("other")
    assert scene.store().tags.find("good").tag.generation == 1


SAMPLE = Tag(
    name="good",
    fingerprint=MARK.digest,
    components=dict(MARK.components),
    records=({"key": ONE.key, "generation": 1, "sha256": "0" * 64, "files": 1, "bytes": 1},),  # type: ignore[arg-type]
    surroundings={"python": "3.12.1", "packages": {}},  # type: ignore[arg-type]
).dump()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.integers(0, len(SAMPLE) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_no_bytes_break_the_parser(place: int, put: bytes, cut: int) -> None:
    """Whatever lies there: it is read, or it is an error of ours."""
    assert isinstance(parse_entry(SAMPLE), Tag)
    try:
        read = parse_entry(SAMPLE[:place] + put + SAMPLE[place + cut :])
    except CompileCacheError:
        return
    assert parse_entry(read.dump()) == read


def test_tags_live_in_every_kind_of_store(place: Place, tmp_path: Path) -> None:
    """A directory, memory and S3: made, found, brought back, released, collected."""
    store, cache = place.open(), CacheDir(tmp_path / "root")
    cache.prepare()
    plant(cache.root, FIRST)
    Exchange(cache, store, MARK, [ONE.key]).publish(ONE, list(FIRST), None)
    made = make_tag("good", MARK.digest, store, cache)
    assert make_tag("good", MARK.digest, store, cache).full_name == "good@2"
    assert place.open().tags.find("good@1").tag == made
    other = CacheDir(tmp_path / "other")
    other.prepare()
    assert restore_tag(made, other, place.open(), print).restored == 1
    assert inspect_store(store).tags == 2
    assert store.tags.release("good") == ("good@1", "good@2")
    assert place.open().tags.shelf().tags == ()
    assert Collector(store, Retention(grace_hours=0)).collect(time.time() + 60).tags == 2


# -- what undoes a change -------------------------------------------------------------------------


def undone(then: dict[str, str], *found: Change, **more: object) -> list[str]:
    """The commands for these changes, when these packages were installed; without the last."""
    around = Surroundings(python="3.12.1", packages=then, **more)  # type: ignore[arg-type]
    tag = parse_entry(SAMPLE)
    assert isinstance(tag, Tag)
    tag = tag.model_copy(update={"surroundings": around})
    *lines, last = Undoing(tag).commands(found)
    assert last == "compilecache restore --tag good@1"
    return lines


def test_a_build_of_torch_is_asked_for_where_such_builds_are() -> None:
    """The version names the platform; a build of the same version is installed over the other."""
    then = {"torch": "2.11.0+cu130", "numpy": "2.0"}
    swapped = Change("package", "torch", "2.11.0+cu130", "2.10.0+cu128")
    index = "--extra-index-url https://download.pytorch.org/whl/cu130"
    show, install = undone(then, swapped)
    assert show == "compilecache tag good@1 --show constraints > good-constraints.txt"
    assert install == f"pip install -c good-constraints.txt {index} torch==2.11.0+cu130"
    rebuilt = Change("torch", "torch.git", "70d99e998b", "449b176841")
    assert undone(then, rebuilt)[-1] == (
        f"pip install --force-reinstall --no-deps -c good-constraints.txt {index} "
        "torch==2.11.0+cu130"
    )
    assert index not in undone(then, Change("package", "numpy", "2.0", "2.1"))[-1]


def test_what_came_from_an_address_is_installed_from_it() -> None:
    """The commit is in it; what came from a folder nobody else has is a comment."""
    then = {"sglang": "0.5", "mine": "1.0"}
    origin = "git+https://github.com/sgl-project/sglang@0123abc"
    lines = undone(
        then,
        Change("package", "sglang", "0.5", "0.6"),
        Change("package", "mine", "1.0", "absent"),
        origins={"sglang": origin, "mine": "file:///home/me/mine"},
    )
    assert lines[0] == "# mine 1.0 was installed from a folder: install it anew"
    assert lines[-1] == f"pip install -c good-constraints.txt 'sglang @ {origin}'"


def test_values_are_quoted_and_what_no_command_undoes_is_a_comment() -> None:
    """A shell takes every line as it stands."""
    lines = undone(
        {},
        Change("python", "python", "3.12.1", "3.13.0"),
        Change("variable", "TORCH_LOGS", "a b; rm -rf x", "absent"),
        Change("setting", "inductor.max_autotune", "True", "absent"),
        Change("gpu", "GPUs", "8 x NVIDIA H200", "none"),
    )
    assert lines[0].startswith("# Python 3.12.1 is needed: python3.12 -m venv")
    assert "export TORCH_LOGS='a b; rm -rf x'" in lines
    assert "# torch._inductor.config.max_autotune was True, is absent: set in code" in lines
    assert lines[-1] == "# GPUs was 8 x NVIDIA H200: run on such a machine"


@pytest.mark.parametrize(
    "strange",
    [
        {"packages": {"--index-url": "1"}},
        {"packages": {"a": "1\n--index-url https://example.org"}},
        {"packages": {"a": "1"}, "origins": {"a": "https://x\nb==1"}},
        {"variables": {"X; touch /tmp/x; Y": "1"}},
        {"sources": [{"module": "m", "digest": "d", "path": "p", "commit": "--force"}]},
    ],
)
def test_a_tag_cannot_smuggle_words_into_commands(strange: dict[str, object]) -> None:
    """Names, versions, addresses and commits hold what such things hold; else it is damaged."""
    fields = json.loads(SAMPLE)
    fields["surroundings"] = {"python": "3.12.1", "packages": {}} | strange
    with pytest.raises(ChecksumMismatch, match=r"tag is damaged: surroundings"):
        parse_entry(json.dumps(fields).encode())
    lines = undone({}, Change("source", "m\ntouch /tmp/x", "d\ntouch /tmp/y", "e"))
    assert len(lines) == 1 and "\n" not in lines[0] and lines[0].startswith("# ")


def test_variables_of_places_and_jobs_do_not_count() -> None:
    """Only those that change what is compiled or how fast it runs; no folders, hosts or job ids."""
    given = {
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "8",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/x",
        "CUDA_CACHE_PATH": "/tmp/y",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    assert list(variables(given)) == [
        "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_MAX_AUTOTUNE",
    ]  # fmt: skip


def test_a_running_trainer_is_not_ended_by_its_tag(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not published is logged, or raised when strict; a bad name is an error either way."""
    cache = scene.root("root")
    used = Used(MARK.digest, plan_of([SPECS[0]]), [ONE], cache)
    assert tag_run("good", used, scene.store(), Words(), strict=False) is None
    assert "this run was not tagged as 'good'" in caplog.text
    with pytest.raises(CompileCacheError):
        tag_run("good", used, scene.store(), Words(), strict=True)
    for name, words in (("a/b", Words()), ("good@3", Words()), ("good", Words(-1.0))):
        with pytest.raises(PlanError):
            tag_run(name, used, scene.store(), words, strict=False)
    scene.publish("root", FIRST)
    assert tag_run("good", used, scene.store(), Words(), strict=False) == "good@1"


# -- what a tag keeps -----------------------------------------------------------------------------


def test_what_a_tag_names_is_never_collected(scene: Scene) -> None:
    """Superseded long ago, and the fingerprint too old: the tag's own records and packs stay."""
    scene.tag("good", scene.publish("old", FIRST))
    scene.publish("middle", {"ab/one.bin": b"middle"})
    scene.publish("young", {"ab/one.bin": b"young"})
    scene.storage.pass_time(400 * DAY)
    done = scene.collect()
    assert done.kept_by == {MARK.digest: ("good@1",)}
    assert [(part.records, part.packs, part.whole) for part in done.collected] == [(1, 1, False)]
    assert scene.restore("good", "fresh").missing == ()
    assert scene.files("fresh") == FIRST
    assert inspect_store(scene.store(), deep=True).damage == []


def test_a_tag_that_is_released_keeps_nothing(scene: Scene) -> None:
    """gc then takes the records and the tag; its number is not used again."""
    cache = scene.publish("old", FIRST)
    scene.tag("good", cache)
    assert scene.store().tags.release("good") == ("good@1",)
    with pytest.raises(PlanError, match="has no tag 'good'"):
        scene.store().tags.find("good")
    with pytest.raises(PlanError, match="has no tag"):
        scene.store().tags.release("good")
    scene.publish("young", {"ab/one.bin": b"young"})
    scene.storage.pass_time(2 * DAY)
    done = scene.collect()
    assert (done.kept_by, done.tags) == ({}, 1)
    assert not scene.object("v1/tags/good/1.json").exists()
    assert not scene.object(f"v1/{MARK.digest}/artifacts/{ONE.key}/1.json").exists()
    scene.storage.pass_time(400 * DAY)
    assert [part.whole for part in scene.collect().collected] == [True]
    scene.publish("new", FIRST)
    assert scene.tag("good").full_name == "good@3"


def test_one_generation_is_released_alone(scene: Scene) -> None:
    """The others of the name stay."""
    cache = scene.publish("root", FIRST)
    for _ in range(3):
        scene.tag("good", cache)
    scene.store().tags.release("good@2")
    assert [tag.generation for tag in scene.store().tags.shelf().tags] == [1, 3]
    assert scene.store().tags.find("good").tag.generation == 3
    with pytest.raises(PlanError, match="Choose among good@1, good@3"):
        scene.store().tags.find("good@2")


def test_a_tag_that_cannot_be_read_stops_collecting_until_it_is_released(scene: Scene) -> None:
    """Nobody knows what it needs: nothing goes, the reason names it, and releasing it helps."""
    scene.tag("good", scene.publish("root", FIRST))
    scene.object("v1/tags/good/1.json").write_text("torn")
    scene.storage.pass_time(400 * DAY)
    done = scene.collect()
    assert done.collected == []
    assert "good@1" in done.held[MARK.digest] and "--release" in done.held[MARK.digest]
    scene.store().tags.release("good@1")
    assert [part.whole for part in scene.collect().collected] == [True]


class LateSweep(AgedStorage):
    """A storage on which a collector, already at work, takes a pack once a tag has been written."""

    def create(self, name: str, data: bytes) -> bool:
        """As the inner one, and then the collector."""
        done = super().create(name, data)
        if name.startswith("v1/tags/good/1"):
            for pack in self.inner.walk(f"v1/{MARK.digest}/packs"):
                self.inner.delete(f"v1/{MARK.digest}/packs/{pack}")
        return done


def test_a_tag_whose_packs_are_collected_meanwhile_is_no_tag(tmp_path: Path) -> None:
    """The collector looked before the tag was there: whoever tags hears of it, and no tag is left."""
    scene = Scene(tmp_path, LateSweep(LocalStorage(tmp_path / "store")))
    cache = scene.publish("root", FIRST)
    with pytest.raises(StoreUnavailable, match=r"collected meanwhile: pack .* is missing"):
        scene.tag("good", cache)
    assert scene.store().tags.shelf().tags == ()


def test_a_collector_that_has_begun_is_waited_for(scene: Scene) -> None:
    """The tag is made when its mark is gone, and not before."""
    cache, store = scene.publish("root", FIRST), scene.store()
    made: list[Tag] = []
    thread = threading.Thread(target=lambda: made.append(scene.tag("good", cache)))
    with Sweep(store.storage, store.call, f"v1/{MARK.digest}"):
        thread.start()
        while not scene.object("v1/tags/good/1.json").exists():
            time.sleep(0.01)
        thread.join(0.3)
        assert made == []
    thread.join(20)
    assert [tag.full_name for tag in made] == ["good@1"]


# -- who is believed ------------------------------------------------------------------------------


def test_with_a_trust_key_an_unsigned_tag_is_as_good_as_absent(
    scene: Scene, keys: dict[str, SignKey]
) -> None:
    """Not parsed and not used; a signed older one of the name is; alone it is refused."""
    signed = Scene(scene.folder, scene.storage, signing(keys["a"]))
    signed.tag("good", signed.publish("root", FIRST))
    scene.tag("good")
    scene.tag("strange")
    trusting = Keys((keys["a"].public,))
    found = scene.store(trusting).tags.find("good")
    assert (found.tag.generation, "not signed" in found.passed_over[0]) == (1, True)
    with pytest.raises(UntrustedArtifact, match="'strange@1': not signed"):
        scene.store(trusting).tags.find("strange")
    assert scene.restore("good", "fresh", trusting).missing == ()
    kinds = [f.kind for f in inspect_store(scene.store(trusting)).damage]
    assert kinds == ["signature", "signature"]


def test_a_tag_that_was_altered_after_signing_is_refused(
    scene: Scene, keys: dict[str, SignKey]
) -> None:
    """One byte is enough."""
    signed = Scene(scene.folder, scene.storage, signing(keys["a"]))
    signed.tag("good", signed.publish("root", FIRST), words=Words(note="mine"))
    place = scene.object("v1/tags/good/1.json")
    place.write_bytes(place.read_bytes().replace(b'"mine"', b'"mind"'))
    assert scene.store().tags.find("good").tag.note == "mind"
    with pytest.raises(UntrustedArtifact, match=r"is not what .* signed"):
        scene.store(Keys((keys["a"].public,))).tags.find("good")


def test_without_the_key_nothing_is_tagged_or_released_where_only_signed_tags_count(
    scene: Scene, keys: dict[str, SignKey]
) -> None:
    """Who trusts and cannot sign hears so; a release that a stranger wrote lets nothing go."""
    signed = Scene(scene.folder, scene.storage, signing(keys["a"]))
    signed.tag("good", signed.publish("root", FIRST))
    trusting = scene.store(Keys((keys["a"].public,)))
    with pytest.raises(UntrustedArtifact, match="no key to sign with"):
        make_tag("good", MARK.digest, trusting, None)
    with pytest.raises(UntrustedArtifact, match="no key to sign with"):
        trusting.tags.release("good")
    scene.store().tags.release("good")
    assert trusting.tags.find("good").tag.generation == 1
    scene.storage.pass_time(400 * DAY)
    done = Collector(trusting, Retention()).collect(time.time())
    assert done.kept_by == {MARK.digest: ("good@1",)}


def test_a_new_key_signs_the_tags_too(scene: Scene, keys: dict[str, SignKey]) -> None:
    """After a rotation who trusts only the new key can bring back what the old one signed."""
    old = Scene(scene.folder, scene.storage, signing(keys["a"]))
    old.tag("good", old.publish("root", FIRST))
    scene.tag("strange")
    rotating = scene.store(Keys((keys["a"].public, keys["b"].public), keys["b"]))
    new, refused = rotating.tags.sign()
    assert (new, len(refused)) == (["good@1"], 1)
    assert "strange@1: not signed" in refused[0]
    assert rotating.tags.sign()[0] == []
    assert scene.restore("good", "fresh", Keys((keys["b"].public,))).missing == ()
    assert scene.files("fresh") == FIRST


def test_tags_are_no_fingerprints(scene: Scene) -> None:
    """Whoever lists fingerprints, also an older version, does not stumble over their folder."""
    scene.tag("good", scene.publish("root", FIRST))
    assert scene.store().fingerprints() == [MARK.digest]
    assert described(MARK) == scene.store().get_fingerprint(MARK.digest)
