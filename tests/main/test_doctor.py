"""``doctor``: each thing that can be wrong, made wrong; what is said of it, and the exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from mounts import read_only, tmpfs
from places import Place
from processes import Ended, Template
from workloads import plan

from compilecache.cachedir import CacheDir
from compilecache.doctor import bytecode, probes
from compilecache.doctor.finding import Finding, Level, worst
from compilecache.doctor.lock import SECOND, check_lock
from compilecache.doctor.packages import check_doubles, check_packages
from compilecache.doctor.root import check_root
from compilecache.doctor.settings import (
    VARIABLES,
    check_settings,
    check_sources,
    check_variables,
)
from compilecache.fingerprint import Fingerprint
from compilecache.packages import described, interfering, packages_of
from compilecache.store import ArtifactStore


def said(findings: Iterable[Finding], level: Level, *words: str) -> Finding:
    """The one finding of a level that has these words; it says why, and what to do."""
    told = list(findings)
    matching = [f for f in told if f.level == level and all(word in f.what for word in words)]
    assert len(matching) == 1, told
    assert matching[0].why.endswith(".")
    assert matching[0].fix
    return matching[0]


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    """A root that is fine."""
    made = CacheDir(tmp_path / "root")
    made.prepare()
    return made


# -- root ---------------------------------------------------------------------------------------


def test_a_root_that_is_fine(tmp_path: Path) -> None:
    """It is made, and nothing is worse than a note."""
    found = list(check_root(CacheDir(tmp_path / "root")))
    assert worst(found) in ("ok", "note")
    assert len(found) >= 4
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700


def test_a_root_in_a_small_memory_without_execution(tmp_path: Path) -> None:
    """Each of its faults is said, not the first alone."""
    options = "size=300m,nr_inodes=2000,noexec,mode=700"
    with tmpfs(tmp_path / "mount", options) as folder:
        found = list(check_root(CacheDir(folder)))
        said(found, "error", "noexec")
        said(found, "note", "in memory (tmpfs)")
        said(found, "warning", "MiB free")
        assert said(found, "warning", "more files").fix == f"df -i {folder}"
    with tmpfs(tmp_path / "mount", "size=8m,nr_inodes=200,mode=700") as folder:
        found = list(check_root(CacheDir(folder)))
        said(found, "error", "8 MiB free")
        said(found, "error", "more files")


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    """Read-only, and below a file: one error, and nothing else is tried."""
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        (found,) = check_root(CacheDir(root))
        assert (found.level, found.is_command) == ("error", True)
    (tmp_path / "file").touch()
    (found,) = check_root(CacheDir(tmp_path / "file" / "root"))
    assert "cannot be written" in found.what


def test_a_root_of_others(cache: CacheDir) -> None:
    """Whoever can write it runs code in the trainer."""
    cache.root.chmod(0o777)
    assert said(check_root(cache), "error", "777").fix == f"chmod 700 {cache.root}"
    cache.root.chmod(0o700)
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(cache.root, 12345, -1)
    assert "COMPILECACHE_ROOT" in said(check_root(cache), "error", "uid 12345").fix


MOUNT = "43 27 0:53 / {folder} rw - nfs4 server:/ rw\n"


def _on_network(mounts: Path, root: Path) -> list[Finding]:
    import subprocess

    place = f"/proc/{os.getpid()}/mountinfo"
    subprocess.run(["mount", "--bind", mounts, place], check=True)
    try:
        return list(check_root(CacheDir(root)))
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_root_on_the_network(fresh: Template, tmp_path: Path) -> None:
    """The file system is named."""
    if os.getuid() != 0:
        pytest.skip("only root can pretend other mounts")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNT.format(folder=tmp_path))
    said(fresh.call(_on_network, mounts, tmp_path / "root"), "error", "nfs4")


# -- lock ---------------------------------------------------------------------------------------


def test_a_lock_that_works(cache: CacheDir) -> None:
    """A second process is kept out; one that is killed gives the lock back; nothing is left."""
    found = list(check_lock(cache))
    assert worst(found) == "ok"
    assert len(found) == 5
    assert not list(cache.root.glob(".compilecache/doctor-*"))


def test_a_lock_that_is_held(cache: CacheDir) -> None:
    """Its holder is named and not disturbed."""
    with cache.lock("compiling seq_len=128"):
        found = list(check_lock(cache))
        assert "compiling seq_len=128" in str(cache.holder())
    said(found, "note", "compiling seq_len=128")
    assert [f.level for f in found].count("ok") == 4


def test_a_lock_that_lets_others_in(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system where locks do nothing."""
    monkeypatch.setattr(CacheDir, "lock", lambda self, doing, **_: nullcontext())
    assert "COMPILECACHE_ROOT" in said(check_lock(cache), "error", "a second process is let in").fix


INHERITED = """
import fcntl, os, subprocess, sys

lock = os.open(sys.argv[1] + "/.compilecache/lock", os.O_RDWR)
print("refused", flush=True)
sys.stdin.readline()
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.Popen(["sleep", "1"], pass_fds=[lock], stdout=subprocess.DEVNULL)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_that_does_not_come_back(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else keeps it although its holder was killed."""
    monkeypatch.setattr("compilecache.doctor.lock.BACK_SECONDS", 0.2)
    found = list(check_lock(cache, (sys.executable, "-c", INHERITED)))
    said(found, "error", "does not come back")


def test_a_second_process_that_dies(cache: CacheDir) -> None:
    """A finding, not an end."""
    said(check_lock(cache, (sys.executable, "-c", "pass")), "error", "cannot be tried")
    assert SECOND[0] == sys.executable


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_does_harm(name: str, cache: CacheDir) -> None:
    """Said when it does harm, with the command that ends it; and not when it does none."""
    harms, level, _ = VARIABLES[name]
    values = {"0", "1"}
    for value in values:
        found = list(check_variables(cache, {name: value}))
        if harms(value):
            assert said(found, level, f"{name}={value}").fix == f"unset {name}"
        else:
            assert worst(found) == "ok"
    assert any(harms(value) for value in values)


def test_folders_that_lie_elsewhere(cache: CacheDir, tmp_path: Path) -> None:
    """Triton's outside of the root, Inductor's another root; within, and of another root: fine."""
    root = str(cache.root)
    fine = {"TRITON_CACHE_DIR": f"{root}/triton", "TORCHINDUCTOR_CACHE_DIR": root}
    assert worst(check_variables(cache, fine)) == "ok"
    other = CacheDir(tmp_path / "other")
    other.prepare()
    assert worst(check_variables(cache, {"TRITON_CACHE_DIR": f"{other.root}/triton"})) == "ok"
    found = list(
        check_variables(cache, {"TRITON_CACHE_DIR": "/x", "TORCHINDUCTOR_CACHE_DIR": "/y z"})
    )
    assert said(found, "warning", "TRITON_CACHE_DIR=/x").fix == "unset TRITON_CACHE_DIR"
    assert said(found, "warning", "/y z").fix == f"export TORCHINDUCTOR_CACHE_DIR={root}"


def test_variables_of_the_fingerprint(cache: CacheDir) -> None:
    """All in one note."""
    given = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TRITON_DEBUG": "a b", "HOME": "/"}
    assert "TRITON_DEBUG='a b'" in said(check_variables(cache, given), "note", "are set").fix


def _hidden() -> list[Finding]:
    import torch._dynamo.config as config

    with config.patch(suppress_errors=True, error_on_nested_fx_trace=False):
        return list(check_settings())


def test_settings_that_hide_damage(fresh: Template) -> None:
    """As some import may have made them; by default none is."""
    found = fresh.call(_hidden)
    assert "suppress_errors" in said(found, "warning", "suppress_errors is True").fix
    assert "memory" in said(found, "warning", "error_on_nested_fx_trace is False").why
    assert worst(fresh.call(_as_they_are)) == "ok"


def _as_they_are() -> list[Finding]:
    """In this process, where nobody has changed one."""
    return list(check_settings())


def test_sources_that_hide_damage(tmp_path: Path) -> None:
    """The line is named, however it is written; comments, other values and environments are not."""
    (tmp_path / "train.py").write_text(
        "import torch._dynamo\n"
        "torch._dynamo.config.error_on_nested_fx_trace = False\n"
        "# torch._dynamo.config.suppress_errors = True\n"
        "with torch._dynamo.config.patch(force_compile_during_fx_trace=True):\n"
        "    torch._dynamo.config.suppress_errors = False\n"
    )
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").touch()
    shutil.copy(tmp_path / "train.py", tmp_path / "venv/other.py")
    found = list(check_sources(tmp_path))
    assert [f.what.partition(" sets")[0] for f in found] == [
        f"{tmp_path}/train.py:2",
        f"{tmp_path}/train.py:4",
    ]
    assert {f.level for f in found} == {"warning"}


# -- packages -----------------------------------------------------------------------------------


@pytest.fixture
def xformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is installed, as far as its metadata tell; it cannot be imported."""
    folder = tmp_path / "site" / "xformers-0.0.30.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: xFormers\nVersion: 0.0.30\n")
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_bytecode_that_is_not_kept(tmp_path: Path) -> None:
    """Without it every process compiles two thousand sources; found where nothing may be written."""
    folder = tmp_path / "torch"
    (folder / "_dynamo").mkdir(parents=True)
    source = folder / "_dynamo" / "__init__.py"
    source.touch()
    (warned,) = bytecode.check_bytecode({"PYTHONDONTWRITEBYTECODE": "1"}, folder)
    assert (warned.level, warned.is_command) == ("warning", True)
    assert f"compileall -q {folder}" in warned.fix
    assert [*bytecode.check_bytecode({}, folder)] == []  # the first import writes it
    subprocess.run([sys.executable, *warned.fix.partition("  #")[0].split()[1:]], check=True)
    assert [
        one.level for one in bytecode.check_bytecode({"PYTHONDONTWRITEBYTECODE": "1"}, folder)
    ] == ["ok"]


def test_packages_that_were_not_there(xformers: None) -> None:
    """New, gone, changed, unknown, equal; nothing is imported."""
    here = interfering()
    assert here["xformers"] == "0.0.30"
    found = list(check_packages({"xformers": "0.0.30"}, {"vllm": "1"}))
    assert said(found, "warning", "xformers 0.0.30", "did not have").fix.startswith("pip uninstall")
    assert said(found, "note", "vllm is not installed").fix == "pip install vllm==1"
    said(check_packages({"vllm": "2"}, {"vllm": "1"}), "note", "vllm is 2", "had 1")
    assert "not known" in said(check_packages({"vllm": "2"}, None), "note", "vllm 2").why
    assert worst(check_packages({"vllm": "1"}, {"vllm": "1"})) == "ok"
    assert worst(check_packages({}, {})) == "ok"
    assert "xformers" not in sys.modules


def test_two_packages_in_one_folder() -> None:
    """Both bring ``triton``: who knows which one runs."""
    said(check_doubles({"triton": ["triton", "pytorch-triton"]}), "warning", "pytorch-triton and")
    assert not list(check_doubles({"torch": ["torch", "torch"]}))


def test_packages_are_kept_with_a_fingerprint(xformers: None) -> None:
    """Beside the components: the digest is the same with them and without."""
    mark = Fingerprint({"torch": "2"})
    text = described(mark)
    assert packages_of(text) == interfering()
    assert Fingerprint.parse(text).digest == mark.digest
    assert packages_of(mark.dump()) is None
    assert packages_of("nothing") is None


# -- torch --------------------------------------------------------------------------------------


def test_names_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, with what fails without them; none is missing here."""
    assert worst(probes.check_names()) == "ok"
    monkeypatch.setitem(probes.PARTS, "programs", lambda: ["torch._x.y"])
    assert "programs" in said(probes.check_names(), "error", "torch._x.y").why


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can restore, and compile nothing."""
    assert worst(probes.check_compilers(["cpu"])) == "ok"
    monkeypatch.setenv("PATH", "")
    said(probes.check_compilers(["cpu"]), "warning", "no compiler 'g++'")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said(probes.check_threads_of_cpu(["cpu"]), "note", "OMP_NUM_THREADS")
    assert not list(probes.check_threads_of_cpu(["cuda:0"]))


# -- the command --------------------------------------------------------------------------------


Doctor = Callable[..., Ended]


@pytest.fixture
def doctor(fresh: Template, place: Place) -> Doctor:
    """Runs the command on a place, from its folder."""

    def run(*words: object, env: Mapping[str, str | None] | None = None) -> Ended:
        where = ("--root", place.root, "--store", place.store, "--device", "cpu")
        return fresh.command("doctor", *words, *where, env=env, cwd=place.folder)

    return run


def findings(ended: Ended) -> list[Finding]:
    """What ``--json`` told."""
    rows = json.loads(ended.out)["findings"]
    return [Finding(row["what"], row["why"], row["fix"], row["level"]) for row in rows]


def test_a_machine_that_is_fine(doctor: Doctor, place: Place) -> None:
    """Exit code 0; every group was looked at; people get 80 columns; the store stays empty."""
    ended = doctor("--json")
    assert ended.code == 0, ended.out + ended.err
    told = ended.json
    assert {row["group"] for row in told["findings"]} == {
        "root", "lock", "store", "settings", "torch", "packages",
    }  # fmt: skip
    assert told["level"] == "note"
    people = doctor()
    assert people.code == 0
    assert "checks are fine\n" in people.out
    lines = [line for line in people.out.splitlines() if not line.startswith("  $ ")]
    assert all(len(line) <= 80 for line in lines)
    assert not [path for path in place.store.rglob("*") if path.is_file()]


def test_exit_codes(doctor: Doctor, place: Place) -> None:
    """3 for warnings, 1 for a store that does not answer, 4 for a root that others can write."""
    warned = doctor(env={"TRITON_CACHE_DIR": "/elsewhere"})
    assert warned.code == 3, warned.out
    assert "WARNING settings: TRITON_CACHE_DIR=/elsewhere" in warned.out
    assert "\n  $ unset TRITON_CACHE_DIR\n" in warned.out
    shutil.rmtree(place.store)
    place.store.touch()
    broken = doctor()
    assert broken.code == 1, broken.out
    assert "BROKEN store: " in broken.out
    place.root.chmod(0o777)
    assert doctor().code == 4
    assert doctor("--compile").code == 2


def test_what_the_published_environment_had(fresh: Template, doctor: Doctor, place: Place) -> None:
    """Threads, a variable and a package that differ: each with the command that makes it alike."""
    place.write(plan("product", [2]))
    words = (place.plan_file, "--device", "cpu")
    mine = fresh.command("fingerprint", *words, "--json", cwd=place.folder).json
    components = {**mine["components"], "cpu.threads": "7", "env.TRITON_DEBUG": "1", "driver": "9"}
    mark = Fingerprint(components)
    text = json.dumps({**json.loads(mark.dump()), "packages": {"vllm": "0.9"}})
    said(findings(doctor(place.plan_file, "--json")), "note", "nothing is published")
    ArtifactStore.open(place.store).put_fingerprint(mark.digest, text)
    ended = doctor(place.plan_file, "--json")
    assert ended.code == 3, ended.err
    found = findings(ended)
    assert said(found, "warning", "torch uses 2, published: 7").fix == "export OMP_NUM_THREADS=7"
    assert said(found, "warning", "env.TRITON_DEBUG").fix == "export TRITON_DEBUG=1"
    said(found, "warning", "driver differs")
    said(found, "note", "vllm is not installed", "0.9")


@pytest.mark.slow
def test_a_graph_that_is_never_cached(doctor: Doctor, place: Place) -> None:
    """The operation, the line that made it, and torch's reason; the root stays as it was."""
    place.write(plan("passed_by", [3, 2]))
    ended = doctor(place.plan_file, "--compile", "--json")
    assert ended.code == 3, ended.err
    found = said(findings(ended), "warning", "never caches", "workloads.py:", "in forward")
    assert "autograd_function_apply" in found.what
    assert "x=[2,8]" in found.what
    assert "ALLOW_CUSTOM_AUTOGRAD" in found.fix
    assert CacheDir(place.root).files() == set()
