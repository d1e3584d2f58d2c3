"""What a cache root keeps and lets go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import environment

from compilecache.artifact import FileEntry, Record, hash_files
from compilecache.cachedir import CacheDir
from compilecache.cli import gc as command
from compilecache.errors import LockTimeout
from compilecache.exchange import Exchange
from compilecache.fingerprint import Fingerprint
from compilecache.keeping import DAY
from compilecache.rootbudget import RootBudget, RootTrimmer, Trim
from compilecache.rootfolder import OWN

NEVER = RootBudget()
ALL = RootBudget(keep_bytes=0, keep_files=0)


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    """A root that is ready."""
    cache = CacheDir(tmp_path / "root")
    cache.prepare()
    return cache


def plant(cache: CacheDir, *names: str, size: int = 1000) -> None:
    """Files below the root."""
    for name in names:
        path = cache.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode().ljust(size, b"."))


def keep(
    cache: CacheDir, key: str, *names: str, fingerprint: str = "ab" * 16, published: bool = True
) -> Record:
    """A record of files of the root."""
    plant(cache, *(name for name in names if not (cache.root / name).exists()))
    found = hash_files(cache.root, names)
    entries = tuple(FileEntry(name, *found[name], "0" * 64) for name in sorted(names))
    record = Record(fingerprint=fingerprint, target=None, key=key, files=entries, pack=None)
    cache.keep_record(record, published=published)
    return record


def age(cache: CacheDir, days: float, pattern: str = "**/*") -> None:
    """Makes what is there now look as if nobody had used it since."""
    then = time.time() - days * DAY
    for path in cache.root.glob(pattern):
        if path.is_file():
            os.utime(path, (then, then))


def trim(cache: CacheDir, budget: RootBudget) -> Trim:
    """What ``gc --local --yes`` did; what it said it would do is the same."""
    planned = RootTrimmer(cache, budget).plan()
    done = RootTrimmer(cache, budget).trim(timeout=5)
    assert planned == done
    return done


def kinds(done: Trim) -> list[tuple[str, int]]:
    """Kind and number of files."""
    return [(part.kind, part.files) for part in done.trimmed]


def test_below_its_budget_a_root_keeps_everything(cache: CacheDir) -> None:
    """Also what no record lists."""
    keep(cache, "adopted", "fxgraph/a/b")
    plant(cache, "aa/orphan.so")
    age(cache, 30)
    assert trim(cache, NEVER).trimmed == []
    assert cache.files() == {"fxgraph/a/b", "aa/orphan.so"}


def test_nothing_in_use_goes(cache: CacheDir) -> None:
    """Young files and records stay even when there is no room at all; it is said."""
    keep(cache, "adopted", "fxgraph/a/b")
    plant(cache, "aa/orphan.so")
    done = trim(cache, ALL)
    assert done.trimmed == []
    assert (done.over_files, done.over_bytes) == (2, 2000)


def test_what_no_record_lists_goes_first_and_longest_unused_first(cache: CacheDir) -> None:
    """Until the root fits, and no further (pytorch#196993)."""
    keep(cache, "adopted", "fxgraph/a/b")
    plant(cache, "aa/one.so", "aa/two.so", "aa/three.so")
    age(cache, 60)
    age(cache, 30, "aa/two.so")
    assert kinds(trim(cache, RootBudget(keep_files=2))) == [("unlisted", 2)]
    assert cache.files() == {"fxgraph/a/b", "aa/two.so"}
    assert kinds(trim(cache, RootBudget(keep_bytes=1500))) == [("unlisted", 1)]
    assert not (cache.root / "aa").exists()


def test_fingerprints_go_longest_unused_first(cache: CacheDir) -> None:
    """With the files that only they list; files that others list stay, with them."""
    keep(cache, "adopted", "fxgraph/old", "aa/shared.so", fingerprint="aa" * 16)
    keep(cache, "adopted", "fxgraph/new", "aa/shared.so", fingerprint="bb" * 16)
    age(cache, 60)
    age(cache, 30, f"{OWN}/records/{'bb' * 16}/*")
    done = trim(cache, RootBudget(keep_files=2))
    assert [(p.kind, p.what, p.files) for p in done.trimmed] == [("records", "aa" * 16, 1)]
    assert cache.files() == {"fxgraph/new", "aa/shared.so"}
    assert cache.records("aa" * 16) == {}
    (kept,) = cache.records("bb" * 16).values()
    assert cache.damaged(kept.files) == ()


def test_a_fingerprint_unused_for_long_goes_though_there_is_room(cache: CacheDir) -> None:
    """Unless somebody asked to keep it."""
    keep(cache, "adopted", "fxgraph/old")
    age(cache, 91)
    assert trim(cache, RootBudget(keep=("abab",))).trimmed == []
    assert kinds(trim(cache, NEVER)) == [("records", 1)]
    assert cache.files() == set()


def test_what_no_store_has_is_kept(cache: CacheDir) -> None:
    """It would have to be compiled again; the number is said."""
    keep(cache, "adopted", "fxgraph/mine", published=False)
    age(cache, 365)
    done = trim(cache, ALL)
    assert (done.trimmed, done.unpublished, done.over_files) == ([], 1, 1)
    assert cache.files() == {"fxgraph/mine"}


def test_incomplete_records_protect_nothing(cache: CacheDir) -> None:
    """A file of it is missing: the rest cannot be used."""
    record = keep(cache, "adopted", "fxgraph/a", "fxgraph/b")
    (cache.root / "fxgraph/a").unlink()
    age(cache, 60)
    assert kinds(trim(cache, ALL)) == [("unlisted", 1)]
    assert cache.records(record.fingerprint) == {}


def test_files_that_were_moved_aside_go_by_age(cache: CacheDir) -> None:
    """They are kept for people to look at, for a while."""
    plant(cache, "aa/x.so", "aa/y.so")
    cache.move_aside("aa/x.so")
    age(cache, 91, f"{OWN}/damaged/*")
    cache.move_aside("aa/y.so")
    assert kinds(trim(cache, NEVER)) == [("damaged", 1)]
    assert len(list((cache.root / OWN / "damaged").iterdir())) == 1


def test_programs_that_no_record_names_go(cache: CacheDir) -> None:
    """Whatever the budget, once they are older than the grace time."""
    keep(cache, "adopted", "programs/named.program")
    plant(cache, "programs/left.program")
    age(cache, 2)
    plant(cache, "programs/young.program")
    assert kinds(trim(cache, NEVER)) == [("programs", 1)]
    assert cache.files() == {"programs/named.program", "programs/young.program"}


def test_unfinished_files_go_and_locks_stay(cache: CacheDir) -> None:
    """A lock file is held by its name: who removes it lets two in."""
    plant(cache, "aa/.123.456.tmp", "triton/k/tmp.pid_1_2/x.cubin", "locks/abc.lock")
    (cache.root / OWN / "staging").mkdir()
    (cache.root / OWN / "staging/left").mkdir()
    age(cache, 2)
    assert kinds(trim(cache, ALL)) == [("unfinished", 2)]
    assert cache.files() == {"locks/abc.lock"}
    assert list((cache.root / OWN / "staging").iterdir()) == []


def test_what_lies_beside_a_kernel_stays_with_it(cache: CacheDir) -> None:
    """Triton takes a kernel by its list, which no record has: it holds absolute paths."""
    keep(cache, "adopted", "triton/K/kernel.json", "triton/K/kernel.cubin")
    plant(cache, "triton/K/__grp__kernel.json", "triton/L/__grp__other.json")
    age(cache, 60)
    assert kinds(trim(cache, RootBudget(keep_files=1)))[0] == ("unlisted", 1)
    keep(cache, "adopted", "triton/K/kernel.json", "triton/K/kernel.cubin")
    plant(cache, "triton/K/__grp__kernel.json")
    age(cache, 60)
    done = trim(cache, ALL)
    assert kinds(done) == [("records", 3)]
    assert cache.files() == set()


def test_looking_at_a_record_is_using_it(cache: CacheDir) -> None:
    """A start that finds its targets complete keeps them for a grace time."""
    mark = Fingerprint(components={"torch": "2"})
    keep(cache, "adopted", "fxgraph/a", fingerprint=mark.digest)
    age(cache, 365)
    exchange = Exchange(cache, None, mark, ["adopted"])
    exchange.look()
    assert set(exchange.complete) == {"adopted"}
    assert trim(cache, ALL).trimmed == []


def test_a_start_in_the_last_moment_is_seen(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It touches the record between the decision and the removal: all of the fingerprint stays."""
    for key in ("adopted-1", "adopted-2"):
        record = keep(cache, key, f"fxgraph/{key}")
    age(cache, 365)
    rename = Path.rename
    touched: list[bool] = []

    def late(path: Path, target: Path) -> Path:
        if not touched:
            touched.append(cache.touch_record(record))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    done = RootTrimmer(cache, ALL).trim(timeout=5)
    assert (touched, done.trimmed) == ([True], [])
    assert set(cache.records(record.fingerprint)) == {"adopted-1", "adopted-2"}
    assert len(cache.files()) == 2


def test_starts_and_collectors_at_the_same_time(cache: CacheDir) -> None:
    """Whoever was told that a record is complete finds its files, for as long as it takes."""
    mark = Fingerprint(components={"torch": "2"})
    names = [f"fxgraph/{n}" for n in range(20)]
    told = 0
    for _ in range(30):
        keep(cache, "adopted", *names, fingerprint=mark.digest)
        age(cache, 365)
        collector = threading.Thread(target=RootTrimmer(cache, ALL).trim, kwargs={"timeout": 9})
        collector.start()
        exchange = Exchange(cache, None, mark, ["adopted"])
        exchange.look()
        collector.join()
        if exchange.complete:
            told += 1
            assert all((cache.root / name).is_file() for name in names)
    assert told <= 30


def test_it_waits_for_the_lock(cache: CacheDir) -> None:
    """Nothing goes while somebody fills the root, and only a plan can be had."""
    plant(cache, "aa/orphan.so")
    age(cache, 60)
    with cache.lock("compiling"):
        with pytest.raises(LockTimeout, match="compiling"):
            RootTrimmer(CacheDir(cache.root), ALL).trim(timeout=0.2)
        assert RootTrimmer(cache, ALL).plan().freed == 1000
    assert cache.files() == {"aa/orphan.so"}


def test_entries_go_before_what_they_point_to(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry without its library makes torch say "hit" and compile."""
    keep(cache, "adopted", "aa/lib.so", "fxgraph/x/entry", "aotautograd/y/entry")
    age(cache, 365)
    gone: list[str] = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        gone.extend([path.name] if path.exists() and path.name[0] not in ".h" else [])
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    RootTrimmer(cache, ALL).trim(timeout=5)
    assert gone[:4] == ["adopted.going", "entry", "entry", "lib.so"]


def test_the_command_says_and_then_does(cache: CacheDir, tmp_path: Path) -> None:
    """A dry run by default; --yes frees as much as was said; other sides are left alone."""
    plant(cache, "aa/orphan.so", size=3_000_000)
    age(cache, 60)
    runner = CliRunner(env={"COLUMNS": "80", "COMPILECACHE_STORE": str(tmp_path / "store")})
    words = ["--root", str(cache.root), "--keep-bytes", "1MB"]
    dry = runner.invoke(command.gc, words)
    assert dry.exit_code == 0, dry.output
    assert "Would free 3.0 MB in the root" in dry.output
    assert "Add --yes" in dry.output
    assert "in the store" not in dry.output
    assert cache.files() == {"aa/orphan.so"}
    data = json.loads(runner.invoke(command.gc, [*words, "--yes", "--json"]).stdout)
    assert (data["done"], data["store"], data["root"]["freed"]) == (True, None, 3_000_000)
    assert cache.files() == set()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("1.5GB", 1_500_000_000), ("10 mb", 10_000_000), ("7", 7), ("0", 0)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    """Decimal ones, as everywhere here."""
    context = command.gc.make_context("gc", ["--keep-bytes", text])
    assert context.params["keep_bytes"] == size


@pytest.mark.parametrize("text", ["many", "-1GB", "1XB", "1e400GB", "nan"])
def test_what_is_no_size_is_usage(text: str) -> None:
    """It is said what one looks like."""
    done = CliRunner().invoke(command.gc, [f"--keep-bytes={text}"])
    assert done.exit_code == 2
    assert "no size" in done.output


def test_a_root_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    """There is nothing to let go."""
    words = ["--root", str(tmp_path / "none"), "--yes"]
    done = CliRunner().invoke(command.gc, words)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "none").exists()


def test_the_commands_need_no_torch(cache: CacheDir, tmp_path: Path) -> None:
    """gc and fsck run, not only show help, without importing it."""
    code = (
        "import sys\nfrom compilecache.cli import group\n"
        "for name in ('gc', 'fsck'):\n"
        "    group.main([name, '--store', sys.argv[1], '--root', sys.argv[2]],"
        " standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store"), str(cache.root)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
