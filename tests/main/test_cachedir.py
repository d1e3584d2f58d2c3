"""One cache root: whether it can be used, who writes it, what is put in place and what never is."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mounts import read_only, tmpfs
from processes import Running, Template

from compilecache.artifact import FileEntry, Record, hash_files
from compilecache.cachedir import CacheDir, default_root
from compilecache.contents import REMADE, TRANSIENT, libraries, travels
from compilecache.ensure import ensure_warm
from compilecache.errors import ChecksumMismatch, LockTimeout, UnsafePath, UntrustedArtifact
from compilecache.jobs import publish_plan, warm_plan
from compilecache.restoring import restore_plan
from compilecache.rootfolder import NETWORK, OWN, filesystem

PACK = "0" * 64


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    """A root that is ready."""
    cache = CacheDir(tmp_path / "root")
    cache.prepare()
    return cache


def plant(root: Path, **files: bytes) -> tuple[FileEntry, ...]:
    """Files below a folder and the entries of a record that would list them; "_" stands for "/"."""
    names = {name.replace("_", "/"): data for name, data in files.items()}
    for name, data in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return tuple(
        FileEntry(path, size, digest, PACK)
        for path, (size, digest) in hash_files(root, names).items()
    )


# -- whether it can be used ---------------------------------------------------------------------


def test_a_new_root_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Made with mode 0700, parents included; making the object touches nothing."""
    cache = CacheDir(tmp_path / "deep" / "root")
    assert not cache.root.exists()
    cache.prepare()
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache.root / OWN).stat().st_mode) == 0o700
    assert list(cache.files()) == []


def test_a_read_only_root(cache: CacheDir) -> None:
    """Also for the superuser, to whom permissions say nothing."""
    with read_only(cache.root), pytest.raises(UnsafePath, match="cannot be written: Read-only"):
        cache.prepare()


def test_a_root_below_a_file(tmp_path: Path) -> None:
    """A file is where a folder should be."""
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePath, match="cannot be written") as caught:
        CacheDir(tmp_path / "file" / "root").prepare()
    assert caught.value.path == str(tmp_path / "file" / "root")


def test_a_root_without_execution(tmp_path: Path) -> None:
    """91005: /tmp mounted noexec; every kernel would fail to load, so it is said at once."""
    with tmpfs(tmp_path / "mount", "size=100m,noexec,mode=700") as folder:
        with pytest.raises(UnsafePath, match="noexec"):
            CacheDir(folder).prepare()
        with pytest.raises(UnsafePath, match="noexec"):
            CacheDir(folder / "below").prepare()


def test_a_full_root(tmp_path: Path) -> None:
    """121122: a small tmpfs; said before anything is compiled, with the space there is."""
    mount = tmpfs(tmp_path / "mount", "size=8m,mode=700")
    with mount as folder, pytest.raises(UnsafePath, match="8 MiB free"):
        CacheDir(folder).prepare()


def test_a_root_that_fills_up_while_it_is_written(tmp_path: Path) -> None:
    """No space left: one error that names the root, and what was there before is whole."""
    with tmpfs(tmp_path / "mount", "size=70m,mode=700") as folder:
        cache = CacheDir(folder)
        cache.prepare()
        cache.say("before")
        file = (folder / "filler").open("wb", buffering=0)
        with file, pytest.raises(OSError, match="No space"):
            while file.write(bytes(2**16)):
                pass
        cache.say("x" * 100_000)
        assert "before" in str(cache.holder())
        (tmp_path / "file").write_bytes(bytes(100_000))
        with pytest.raises(UnsafePath, match="No space left") as caught, cache.explaining():
            shutil.copy(tmp_path / "file", folder / "file")
        assert caught.value.path == str(folder)


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 0:50 / /home/some\\040body rw - nfs4 server:/home rw
41 27 0:51 / /home rw - fuse.sshfs host: rw
42 27 0:52 / /home/fast rw master:2 - xfs /dev/nvme0n1 rw
"""


def _pretending(mounts: Path, root: Path, allowed: bool) -> str:
    with _mounts_of_this_process(mounts):
        try:
            CacheDir(root).prepare(allow_network=allowed)
        except UnsafePath as error:
            return str(error)
        return filesystem(root)


@contextmanager
def _mounts_of_this_process(mounts: Path) -> Iterator[None]:
    import subprocess

    place = f"/proc/{os.getpid()}/mountinfo"
    subprocess.run(["mount", "--bind", mounts, place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_root_on_a_network_file_system(fresh: Template, tmp_path: Path) -> None:
    """173679: NFS is refused, with its name, unless insisted on (triton#11512)."""
    if os.getuid() != 0:
        pytest.skip("only root can pretend other mounts")
    mounts, root = tmp_path / "mountinfo", tmp_path / "root"
    for kind in ("nfs4", "fuse.sshfs"):
        mounts.write_text(f"{MOUNTS}43 27 0:53 / {tmp_path} rw - {kind} server:/ rw\n")
        told = fresh.call(_pretending, mounts, root, False)
        assert f"network file system ({kind})" in told
        assert "--allow-network-root" in told
        assert fresh.call(_pretending, mounts, root, True) == kind


def test_the_file_system_of_a_path() -> None:
    """The deepest mount counts; the kernel's escapes are understood."""
    assert filesystem(Path("/proc/self")) == "proc"
    assert filesystem(Path("/dev/shm")) in ("tmpfs", "unknown", *NETWORK)


def test_a_root_that_belongs_to_somebody_else(cache: CacheDir) -> None:
    """Whoever owns it could plant code that this process would run."""
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(cache.root, 12345, -1)
    with pytest.raises(UntrustedArtifact, match="belongs to uid 12345"):
        cache.prepare()


def test_a_root_that_everybody_can_write(cache: CacheDir) -> None:
    """The error says how to mend it."""
    cache.root.chmod(0o777)
    with pytest.raises(UntrustedArtifact, match="chmod 700"):
        cache.prepare()


# -- who writes it ------------------------------------------------------------------------------


def _hold(root: Path, doing: str) -> None:
    cache = CacheDir(root)
    with cache.lock(doing):
        (root / "held").touch()
        time.sleep(200)


def _until(condition: object, process: Running) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert process.running, process.err
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def holder(fresh: Template, cache: CacheDir) -> Iterator[Running]:
    """Another process that holds the lock."""
    process = fresh.start(_hold, cache.root, "compiling seq_len=128")
    _until((cache.root / "held").exists, process)
    yield process
    process.kill()
    process.wait()


def test_who_waits_hears_of_the_holder(cache: CacheDir, holder: Running) -> None:
    """flashinfer#972: pid, host and what it is doing; at the deadline an error says it again."""
    heard: list[str] = []
    with (
        pytest.raises(LockTimeout) as caught,
        cache.lock("mine", timeout=0.5, waiting=heard.append, every=0.1),
    ):
        pass
    for text in (*heard, caught.value.holder, str(caught.value)):
        assert f"process {holder.pid} on {socket.gethostname()}" in text
        assert "compiling seq_len=128" in text
    assert len(heard) > 1


def test_a_command_that_waits_too_long_leaves_with_5(
    fresh: Template, cache: CacheDir, holder: Running, tmp_path: Path
) -> None:
    """huggingface_hub#2543: no waiting for ever, and the holder's words on the command line."""
    from workloads import plan

    (tmp_path / "plan.yaml").write_text(plan("product", [2]).dump())
    ended = fresh.command(
        "warm", tmp_path / "plan.yaml", "--device", "cpu", "--root", cache.root, "--store", "none",
        "--lock-timeout", "0.2",
    )  # fmt: skip
    assert ended.code == 5
    assert "compiling seq_len=128" in ended.err
    assert "Traceback" not in ended.err


def test_a_holder_that_is_killed_gives_the_lock_back(cache: CacheDir, holder: Running) -> None:
    """filelock#725: the kernel frees it, however long it could have been held."""
    holder.kill(signal.SIGKILL)
    with cache.lock("mine", timeout=30):
        assert cache.holder() != "a process that has not said who it is"
        assert json.loads((cache.root / OWN / "holder.json").read_text())["doing"] == "mine"
    assert not (cache.root / OWN / "holder.json").exists()


def test_a_holder_that_never_said_who_it_is(cache: CacheDir) -> None:
    """A half-written or absent note is no obstacle."""
    assert cache.holder() == "a process that has not said who it is"
    (cache.root / OWN / "holder.json").write_text('{"pid": 1')
    assert cache.holder() == "a process that has not said who it is"


def test_where_files_cannot_be_locked(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock#67, #603: no soft lock instead, which would stay for ever; refused, and said why."""

    def unknown(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    with pytest.raises(UnsafePath, match=r"cannot be locked \(Function not implemented\)"):
        cache.prepare()
    with pytest.raises(UnsafePath, match="Function not implemented"), cache.lock("mine", timeout=1):
        pass
    assert cache.holder() == "a process that has not said who it is"


def test_a_lock_that_is_a_link(cache: CacheDir, tmp_path: Path) -> None:
    """CVE-2025-68146, CVE-2026-22701: what it leads to is neither opened nor cut short."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (cache.root / OWN / "lock").symlink_to(precious)
    with pytest.raises(UnsafePath, match="is a link"):
        cache.prepare()
    with pytest.raises(UnsafePath), cache.lock("mine", timeout=1):
        pass
    assert precious.read_text() == "precious"


def test_a_lock_that_is_given_back_in_another_thread(cache: CacheDir) -> None:
    """filelock#404: a lock that counted by thread was never given back; here the next one gets it."""
    held = cache.lock("mine", timeout=1)
    held.__enter__()
    other = threading.Thread(target=held.__exit__, args=(None, None, None))
    other.start()
    other.join()
    with cache.lock("again", timeout=0):
        assert "again" in str(cache.holder())


def test_it_is_waited_for_longer_than_anything_compiles() -> None:
    """flashinfer#993: a minute was shorter than the compile; by default an hour, in every way in."""
    ways = (CacheDir.lock, ensure_warm, warm_plan, restore_plan, publish_plan)
    for way in ways:
        names = inspect.signature(way).parameters
        wait = names["timeout" if way is CacheDir.lock else "lock_timeout"]
        assert wait.default >= 3600.0


# -- what lies in it ----------------------------------------------------------------------------


def test_staging_sweeps_what_a_killed_process_left(cache: CacheDir) -> None:
    """What lies there is nobody's, since the lock is held."""
    left = cache.root / OWN / "staging" / "left"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    with cache.staging() as folder:
        assert not left.exists()
        assert list(folder.iterdir()) == []
    assert list((cache.root / OWN / "staging").iterdir()) == []


def test_activation_never_overwrites(cache: CacheDir, tmp_path: Path) -> None:
    """Same content is kept; other content under one name is an error that names both files."""
    entries = plant(tmp_path / "staged", fxgraph_a=b"theirs", fxgraph_b=b"same", ab_c=b"new")
    plant(cache.root, fxgraph_a=b"mine", fxgraph_b=b"same")
    with pytest.raises(ChecksumMismatch) as caught:
        cache.activate(tmp_path / "staged", entries)
    assert str(cache.root / "fxgraph/a") in caught.value.faults[0]
    assert "'fxgraph/a' of the store" in caught.value.faults[0]
    assert (cache.root / "fxgraph/a").read_bytes() == b"mine"
    assert not (cache.root / "ab/c").exists()
    (cache.root / "fxgraph/a").unlink()
    assert cache.activate(tmp_path / "staged", entries) == 2
    assert (cache.root / "ab/c").read_bytes() == b"new"


def test_new_folders_come_in_one_piece_index_entries_last(
    cache: CacheDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files join a folder that is there; what else lies in staging stays out."""
    files = {"fxgraph_a": b"1", "aotautograd_b": b"2", "zz_c": b"3", "ab_d": b"4", "cd_e": b"5"}
    entries = plant(tmp_path / "staged", **files)
    plant(tmp_path / "staged", cd_left=b"of another attempt")
    plant(cache.root, ab_mine=b"mine")
    moved: list[str] = []
    rename = os.rename

    def noting(source: str, place: str) -> None:
        moved.append(Path(place).name)
        rename(source, place)

    monkeypatch.setattr("compilecache.cachedir.os.rename", noting)
    assert cache.activate(tmp_path / "staged", entries) == 5
    assert moved == ["zz", "aotautograd", "fxgraph"]
    found = {p.relative_to(cache.root).as_posix() for p in cache.root.rglob("*") if p.is_file()}
    expected = {"fxgraph/a", "aotautograd/b", "zz/c", "ab/d", "ab/mine", "cd/e"}
    assert {name for name in found if not name.startswith(".compilecache")} == expected


def test_a_folder_that_somebody_makes_meanwhile_is_joined(
    cache: CacheDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes its folders whenever it likes, and takes no lock."""
    entries = plant(tmp_path / "staged", ab_c=b"new")
    rename = os.rename

    def late(source: str, place: str) -> None:
        plant(cache.root, ab_mine=b"mine")
        rename(source, place)

    monkeypatch.setattr("compilecache.cachedir.os.rename", late)
    assert cache.activate(tmp_path / "staged", entries) == 1
    assert {p.name: p.read_bytes() for p in (cache.root / "ab").iterdir()} == {
        "c": b"new",
        "mine": b"mine",
    }


def test_a_link_in_the_way_is_a_conflict(cache: CacheDir, tmp_path: Path) -> None:
    """Also one that leads nowhere, and one to a file of the very content."""
    entries = plant(tmp_path / "staged", ab_c=b"new")
    (cache.root / "ab").mkdir()
    for target in (tmp_path / "nowhere", tmp_path / "staged/ab/c"):
        (cache.root / "ab/c").symlink_to(target)
        with pytest.raises(ChecksumMismatch, match="differ"):
            cache.activate(tmp_path / "staged", entries)
        (cache.root / "ab/c").unlink()


def test_damage_is_moved_aside(cache: CacheDir) -> None:
    """Whole files stay; damaged ones make room and can still be looked at."""
    entries = plant(cache.root, fxgraph_a=b"whole", fxgraph_b=b"whole too")
    (cache.root / "fxgraph/b").write_bytes(b"")
    assert cache.damaged(entries) == ("fxgraph/b: 0 bytes instead of 9",)
    assert cache.quarantine(entries) == ("fxgraph/b",)
    assert (cache.root / "fxgraph/a").exists()
    assert not (cache.root / "fxgraph/b").exists()
    assert cache.damaged(entries) == ("fxgraph/b: missing",)
    assert len(list((cache.root / OWN / "damaged").iterdir())) == 1


def test_records_and_what_is_not_published_yet(cache: CacheDir) -> None:
    """A record is there when its files are; one that cannot be read is as if it were not."""
    entries = plant(cache.root, fxgraph_a=b"data")
    record = Record(fingerprint="ab" * 16, target=None, key="adopted", files=entries, pack=None)
    cache.keep_record(record, published=False)
    assert cache.records("ab" * 16) == {"adopted": record}
    assert cache.unpublished("ab" * 16) == {"adopted"}
    cache.keep_record(record, published=True)
    assert cache.unpublished("ab" * 16) == set()
    (cache.root / OWN / "records" / ("ab" * 16) / "adopted.json").write_bytes(b"{")
    assert cache.records("ab" * 16) == {}
    assert cache.files() == {"fxgraph/a"}


@pytest.mark.parametrize(
    "path",
    [
        "locks/c5momhmpcehpoqqy6ina7vizwfsgu6ynbhg5xdlerd2rng3p6bxk.lock",
        "fxgraph/ab/abc/.1234.5678.tmp",
        "ab/.1234.5678.tmp",
        "triton/0/HASH/tmp.pid_1234_abcd/kernel.cubin",
        "ab/cabc.py.lock",
        "ab/tmp0123abcd",
    ],
)
def test_unfinished_files_never_travel(path: str) -> None:
    """172144: temporary files and locks were packed."""
    assert TRANSIENT.search(path)
    assert not travels(path)
    assert not travels(path, {"triton/0/HASH"})


@pytest.mark.parametrize(
    "path",
    [
        "fxgraph/tm/ftmpabcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqr/e",
        "aotautograd/tmpabcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrstu/tmpabcdefghijk",
        "tm/tmpqrstuvwxyz234567abcdefghijklmnopqrstuvwxyz234567ab.so",
        "fxgraph/iw/fiwg/dj2artn7nei6qqu62m4wxxmi3yqy5h4ayklqbcnwdxirct3bc73",
        "ab/cabc.main.so",
    ],
)
def test_finished_files_travel(path: str) -> None:
    """Also those whose hash happens to begin like a temporary name."""
    assert travels(path)


def test_what_entries_write_out_again_stays_home() -> None:
    """Generated sources; and Triton's files where torch bundles them."""
    assert REMADE.match("ab/cabc.py")
    assert not travels("ab/cabc.cpp")
    assert not travels("triton/0/HASH/kernel.cubin")
    assert not travels("triton/0/HASH/kernel.cubin", {"triton/0/OTHER"})


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567", min_size=51, max_size=52))
def test_no_content_hash_looks_unfinished(digest: str) -> None:
    """torch names entries by 52 base-32 letters, prefixed or not: none may be taken for a temp file."""
    for path in (f"fxgraph/{digest[1:3]}/f{digest}/{digest}", f"aotautograd/a{digest}/{digest}"):
        assert travels(path)
    assert travels(f"{digest[1:3]}/c{digest}.so")


def test_libraries_are_found_by_their_locks() -> None:
    """A library that Python holds in memory already is needed all the same."""
    present = {"ab/cabc.so", "ab/cabc.cpp", "cd/ccde.main.so", "ef/cefg.so"}
    used = {"locks/cabc.lock", "locks/ccde.lock", "ab/cabc.cpp"}
    assert libraries(used, present) == {"ab/cabc.so", "cd/ccde.main.so"}


def test_the_default_root(fresh: Template) -> None:
    """COMPILECACHE_ROOT, then TORCHINDUCTOR_CACHE_DIR, then torch's own."""
    ours = {"COMPILECACHE_ROOT": "/ours", "TORCHINDUCTOR_CACHE_DIR": "/theirs"}
    assert fresh.call(default_root, env=ours) == "/ours"
    assert fresh.call(default_root, env={"TORCHINDUCTOR_CACHE_DIR": "/theirs"}) == "/theirs"
    assert Path(fresh.call(default_root)).name.startswith("torchinductor_")


def test_results_of_tuning_may_change(cache: CacheDir) -> None:
    """torch writes the time of the winner anew whenever it times kernels; half a file is damage."""
    name = "ab/0123.best_config"
    (cache.root / "ab").mkdir()
    (cache.root / name).write_bytes(b'{"XBLOCK": 1, "time_taken_ms": 1}')
    entries = tuple(
        FileEntry(path, size, digest, PACK)
        for path, (size, digest) in hash_files(cache.root, [name]).items()
    )
    (cache.root / name).write_bytes(b'{"XBLOCK": 1, "time_taken_ms": 20}')
    assert cache.damaged(entries) == ()
    cache.refuse_conflicts(entries)
    (cache.root / name).write_bytes(b'{"XBLOCK": 1, "time')
    assert "ab/0123.best_config" in cache.damaged(entries)[0]
    with pytest.raises(ChecksumMismatch, match="differ"):
        cache.refuse_conflicts(entries)
    (cache.root / name).unlink()
    assert cache.damaged(entries) == ("ab/0123.best_config: missing",)
