"""Cache roots of other compilers: restored before, published after, never written over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_samples import harvest, plant

from compilecache.artifact import Record
from compilecache.cachedir import CacheDir
from compilecache.errors import ChecksumMismatch, CompileCacheError, PlanError, UnsafePath
from compilecache.exchange import Restored
from compilecache.extraexchange import ExtraExchange, ExtraRoots, Sent
from compilecache.extras import KNOWN, ExtraRoot, extra_roots, parse_extra
from compilecache.fingerprint import Fingerprint
from compilecache.knowngood import restore_tag
from compilecache.pack import write_pack
from compilecache.store import ArtifactStore
from compilecache.tagging import make_tag

MARK = Fingerprint({"workload": "test"})
KERNEL = {"kernel.aa/kernel.cubin": b"\x7fELF one", "kernel.aa/kernel.cu": b"one"}
OTHER = {"kernel.bb/kernel.cubin": b"\x7fELF two"}


@dataclass(frozen=True)
class Pods:
    """Pods with folders of their own, and one store."""

    folder: Path
    told: list[str] = field(default_factory=list)

    @property
    def store(self) -> ArtifactStore:
        """A client."""
        return ArtifactStore.open(self.folder / "store", budget_seconds=5)

    def extra(self, pod: str, name: str = "deepgemm") -> ExtraRoot:
        """The folder of a compiler in one pod."""
        return ExtraRoot(name, self.folder / pod / name)

    def exchange(self, pod: str, name: str = "deepgemm") -> ExtraExchange:
        """What goes between it and the store."""
        return ExtraExchange(self.extra(pod, name), self.store, MARK, self.told.append)

    def publish(self, pod: str, files: Mapping[str, bytes], name: str = "deepgemm") -> Sent:
        """A compiler leaves files there, and they are published."""
        self.extra(pod, name).cache.prepare()
        plant(self.extra(pod, name).cache.root, files)
        return self.exchange(pod, name).publish()

    def restore(self, pod: str, name: str = "deepgemm") -> Restored:
        """What a start does."""
        return self.exchange(pod, name).restore()

    def files(self, pod: str, name: str = "deepgemm") -> dict[str, bytes]:
        """What the compiler finds there."""
        found = harvest(self.extra(pod, name).cache.root)
        return {path: data for path, data in found.items() if not path.startswith(".compilecache")}

    def record(self, name: str = "deepgemm") -> Record:
        """What is in force."""
        return self.store.latest(MARK.digest).records[f"extra-{name}"]


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    """Nothing yet."""
    return Pods(tmp_path)


# -- which there are ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variable", "default"),
    [
        ("triton", "TRITON_CACHE_DIR", ".triton/cache"),
        ("cuda", "CUDA_CACHE_PATH", ".nv/ComputeCache"),
        ("flashinfer", "FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),
        ("tilelang", "TILELANG_CACHE_DIR", ".tilelang/cache"),
        ("deepgemm", "DG_JIT_CACHE_DIR", ".deep_gemm"),
    ],
)
def test_known_roots_lie_where_their_compilers_look(
    name: str, variable: str, default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder the variable decides, without that the compiler's default; with one, it is set."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    below = KNOWN[name].below
    assert parse_extra(name).cache.root == tmp_path / default
    monkeypatch.setenv(variable, str(tmp_path / "set"))
    assert parse_extra(name).cache.root == tmp_path / "set" / below
    given = parse_extra(f"{name}={tmp_path}/given")
    assert given.cache.root == tmp_path / "given" / below
    given.use()
    assert os.environ[variable] == f"{tmp_path}/given"


@pytest.mark.parametrize("words", ["nothing", "a/b=/x", "triton=", "=x", "Triton=/x"])
def test_words_that_mean_no_root_are_refused(words: str) -> None:
    """The message lists those that are known."""
    with pytest.raises(PlanError, match="extra cache root") as caught:
        parse_extra(words)
    assert caught.value.field == "extra_roots"


def test_roots_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    """Files would be taken twice: below the cache root, around it, or one named twice."""
    main = CacheDir(tmp_path / "root")
    for words in (
        [f"triton={tmp_path}/root/triton"],
        [f"cuda={tmp_path}"],
        [f"a={tmp_path}/x", f"b={tmp_path}/x/y"],
        [f"a={tmp_path}/x", f"a={tmp_path}/y"],
    ):
        with pytest.raises(PlanError, match=r"lies in|named twice"):
            extra_roots(words, main)


def test_the_environment_names_them_where_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words win; an empty list of words means none."""
    monkeypatch.setenv("COMPILECACHE_EXTRA_ROOTS", f"cuda={tmp_path}/c:own={tmp_path}/o")
    assert [extra.name for extra in extra_roots(None)] == ["cuda", "own"]
    assert [extra.name for extra in extra_roots(["triton"])] == ["triton"]
    assert extra_roots([]) == ()


# -- there and back -------------------------------------------------------------------------------


def test_two_roots_come_back_in_another_place(pods: Pods) -> None:
    """Each its own files, under a record of its own; a second start fetches nothing."""
    assert pods.publish("one", KERNEL) == Sent(2, 2)
    pods.publish("one", {"op/x.so": b"library"}, "flashinfer")
    assert set(pods.store.keys(MARK.digest)) == {"extra-deepgemm", "extra-flashinfer"}
    assert pods.restore("two").files == 2
    pods.restore("two", "flashinfer")
    assert pods.files("two") == KERNEL
    assert pods.files("two", "flashinfer") == {"op/x.so": b"library"}
    assert pods.restore("two").files == 0
    assert pods.exchange("two").publish() == Sent(2, 0)
    assert pods.record().generation == 1


def test_a_pod_with_more_files_adds_them(pods: Pods) -> None:
    """The next generation has all; its pack only what is new; the first pod gets them too."""
    pods.publish("one", KERNEL)
    pods.restore("two")
    assert pods.publish("two", OTHER) == Sent(3, 1)
    record = pods.record()
    assert (record.generation, record.pack and record.pack.files) == (2, 1)
    pods.restore("three")
    assert pods.files("three") == KERNEL | OTHER


def test_pods_that_did_not_restore_lose_nothing_of_each_other(pods: Pods) -> None:
    """A cold pod publishes only its own files: those of the first stay published."""
    pods.publish("one", KERNEL)
    pods.publish("two", OTHER)
    pods.restore("three")
    assert pods.files("three") == KERNEL | OTHER


class Overtaken(ArtifactStore):
    """A store in which somebody else publishes first, once."""

    def __init__(self, inner: ArtifactStore, pods: Pods) -> None:
        super().__init__(inner.storage, inner._calls.budget)
        self._others = [pods]

    def publish(self, record: Record, pack: Path | None) -> Record:
        """As the store does, second."""
        if self._others:
            self._others.pop().publish("other", OTHER)
        return super().publish(record, pack)


def test_who_is_overtaken_adds_what_the_other_has(pods: Pods) -> None:
    """Both began from nothing and publish at once: what is in force at the end has both."""
    extra = pods.extra("one")
    extra.cache.prepare()
    plant(extra.cache.root, KERNEL)
    store = Overtaken(pods.store, pods)
    ExtraExchange(extra, store, MARK, pods.told.append).publish()
    assert {entry.path for entry in pods.record().files} == {*KERNEL, *OTHER}
    pods.restore("three")
    assert pods.files("three") == KERNEL | OTHER


def test_locks_and_unfinished_files_and_links_are_left_out(pods: Pods) -> None:
    """Of every compiler; a link is named."""
    litter = dict.fromkeys(
        [
            "tmp/12ab/kernel.cu",
            "locks/x",
            "a/tmp.pid_12_ab/k",
            "a/x.lock",
            "a/tmpab12cd34",
            "a/.tmp-x",
        ],
        b"half",
    )
    extra = pods.extra("one")
    extra.cache.prepare()
    plant(extra.cache.root, {**litter, **KERNEL, "op/.ninja_log": b"kept"})
    (extra.cache.root / "link").symlink_to("/etc/passwd")
    pods.exchange("one").publish()
    assert {entry.path for entry in pods.record().files} == {*KERNEL, "op/.ninja_log"}
    assert any("link' is a link" in text for text in pods.told)


def test_triton_s_lists_are_written_for_the_new_place(pods: Pods) -> None:
    """They hold absolute paths: those of another root name files that do not exist."""
    root = pods.extra("one", "triton").cache.root
    group = json.dumps({"child_paths": {"add.json": f"{root}/HASH/add.json"}}).encode()
    kernel = {"HASH/add.json": b"{}", "HASH/add.cubin": b"\x7fELF"}
    pods.publish("one", {**kernel, "HASH/__grp__add.json": group}, "triton")
    pods.restore("two", "triton")
    found = pods.files("two", "triton")
    listed = json.loads(found.pop("HASH/__grp__add.json"))["child_paths"]
    here = pods.extra("two", "triton").cache.root
    assert found == kernel
    assert listed == {name: f"{here}/HASH/{name}" for name in ("add.json", "add.cubin")}


# -- what goes wrong ------------------------------------------------------------------------------


def test_other_content_under_the_same_name_stays(pods: Pods) -> None:
    """Nothing is written over, nothing of the record is put in place; new files still go to the store."""
    pods.publish("one", KERNEL)
    own = {"kernel.aa/kernel.cubin": b"another build"}
    pods.publish("two", own)
    (fault,) = pods.restore("two").faults
    assert isinstance(fault, ChecksumMismatch) and "kernel.aa/kernel.cubin" in str(fault)
    assert pods.files("two") == own
    pods.publish("two", OTHER)
    pods.restore("three")
    assert pods.files("three") == KERNEL | OTHER


def test_what_a_compiler_writes_anew_is_no_damage(pods: Pods) -> None:
    """The driver's index of its cache: never compared, never replaced, published with what is new."""
    pods.publish("one", {"0/a/k1": b"kernel", "index": b"k1"}, "cuda")
    pods.restore("two", "cuda")
    plant(pods.extra("two", "cuda").cache.root, {"index": b"k1 k2"})
    assert pods.restore("two", "cuda").faults == []
    assert pods.files("two", "cuda")["index"] == b"k1 k2"
    pods.publish("two", {"0/a/k2": b"kernel 2"}, "cuda")
    pods.restore("three", "cuda")
    assert pods.files("three", "cuda") == {
        "0/a/k1": b"kernel",
        "0/a/k2": b"kernel 2",
        "index": b"k1 k2",
    }
    assert pods.told == []


def test_damage_in_the_store_reaches_no_root(pods: Pods) -> None:
    """A flipped byte of a pack: the fault is named, and the root stays empty."""
    pods.publish("one", KERNEL)
    (pack,) = (pods.folder / "store").rglob("*.tar.zst")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    (fault,) = pods.restore("two").faults
    assert isinstance(fault, ChecksumMismatch)
    assert pods.files("two") == {}


def test_damage_in_the_root_is_moved_aside_and_mended(pods: Pods) -> None:
    """A truncated file gives way to the whole one."""
    pods.publish("one", KERNEL)
    plant(pods.extra("one").cache.root, {"kernel.aa/kernel.cubin": b""})
    assert pods.restore("one").files == 1
    assert pods.files("one") == KERNEL
    assert "moved aside" in pods.told[0]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../x"])
def test_names_that_leave_the_root_are_refused(pods: Pods, name: str) -> None:
    """A record that names one is passed over, whatever its pack holds."""
    pods.publish("one", KERNEL)
    (place,) = (pods.folder / "store").rglob("extra-deepgemm/1.json")
    text = place.read_text().replace("kernel.aa/kernel.cubin", name)
    place.write_text(text)
    faults = pods.restore("two").faults
    assert faults and all(isinstance(fault, CompileCacheError) for fault in faults)
    assert pods.files("two") == {}
    assert not (pods.folder / "two" / "outside").exists()


def test_a_root_that_others_can_write_is_refused(pods: Pods) -> None:
    """What lies there would be run."""
    root = pods.extra("one").cache.root
    root.mkdir(parents=True)
    root.chmod(0o777)
    with pytest.raises(CompileCacheError, match="chmod"):
        pods.restore("one")


def test_too_many_files_are_refused_before_they_are_read(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says to give the workload a folder of its own."""
    monkeypatch.setattr("compilecache.extraexchange.MOST_FILES", 1)
    with pytest.raises(
        UnsafePath, match=r"2 files, above the limit of 1.*a folder for this workload alone"
    ):
        pods.publish("one", KERNEL)


def test_trouble_with_one_root_leaves_the_others(pods: Pods) -> None:
    """In a warm-up: it is named, and the next root is restored and published."""
    pods.publish("one", KERNEL)
    bad = pods.extra("two", "own").cache.root
    bad.parent.mkdir(parents=True)
    bad.write_text("a file")
    troubles: list[str] = []

    @contextmanager
    def surviving(what: str) -> Iterator[None]:
        try:
            yield
        except CompileCacheError as error:
            troubles.append(f"{what}: {error.problem}")

    roots = ExtraRoots([pods.extra("two", "own"), pods.extra("two")], pods.store, MARK, 5)
    roots.restore(surviving, pods.told.append)
    assert len(troubles) == 1 and troubles[0].startswith("restoring extra root own")
    assert pods.files("two") == KERNEL
    assert [(row.name, row.restored) for row in roots.report()] == [("own", 0), ("deepgemm", 2)]


def test_a_tag_brings_extra_roots_back_where_they_are_asked_for(pods: Pods) -> None:
    """It names their records; off by default, so without asking it says what was left out."""
    pods.publish("one", KERNEL)
    pods.store.put_fingerprint(MARK.digest, MARK.dump())
    main = CacheDir(pods.folder / "root")
    main.prepare()
    tag = make_tag("good", MARK.digest, pods.store, None)
    pods.publish("one", OTHER)
    done = restore_tag(tag, main, pods.store, pods.told.append)
    assert (done.targets, done.left_out) == (0, ("deepgemm",))
    done = restore_tag(tag, main, pods.store, pods.told.append, extras=(pods.extra("two"),))
    assert (done.restored, done.left_out, done.missing) == (1, (), ())
    assert pods.files("two") == KERNEL


def test_packs_of_extra_roots_are_like_any_other(pods: Pods, tmp_path: Path) -> None:
    """The same files make the same pack, wherever the root lies."""
    pods.publish("one", KERNEL)
    info = write_pack(plant(tmp_path / "again", KERNEL), KERNEL, tmp_path / "pack")
    assert pods.record().pack == info
