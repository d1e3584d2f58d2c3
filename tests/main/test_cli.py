"""The command line: what it prints, how it leaves, and one clear error for every bad input."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from mounts import tmpfs
from places import Place
from processes import Ended, Template
from workloads import plan

from compilecache.cli import COMMANDS, exit_code
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    CompileFailed,
    FingerprintMismatch,
    LockTimeout,
    PlanError,
    StoreUnavailable,
    UnexpectedCompile,
    UnsafePath,
    UntrustedArtifact,
)

EVIDENCE = {
    "outcome",
    "hits",
    "misses",
    "bypasses",
    "launches",
    "launched",
    "foreign_files",
    "seconds",
    "again_seconds",
    "peak_bytes",
}


def assert_one_error(ended: Ended, code: int, *words: str) -> None:
    """One clear error on standard error, nothing on standard output, no traceback."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    errors = [li for li in ended.err.splitlines() if li.lower().startswith(("error:", "usage:"))]
    assert errors, ended.err
    for word in words:
        assert word in ended.err
    assert ended.out == ""


# -- what they print ----------------------------------------------------------------------------


def test_warm(fresh: Template, warmed: Place) -> None:
    """The whole report; progress goes to standard error, line by line without a terminal (OneTrainer#1607, pytorch#88384)."""
    shutil.rmtree(warmed.root)
    ended = fresh.command("warm", *warmed.words, "--json")
    assert ended.code == 0
    told = ended.json
    assert set(told) >= {
        "fingerprint", "engine", "root", "store", "targets", "gave_up",
        "restored_bytes", "restored_files", "restore_seconds", "seconds",
    }  # fmt: skip
    row = told["targets"][0]
    assert set(row) >= {
        "key", "target", "device", "status", "evidence", "bytes", "published", "error"
    }  # fmt: skip
    assert set(row["evidence"]) == EVIDENCE
    lines = ended.err.splitlines()
    assert lines[0] == "3 targets"
    assert f"restoring from {warmed.store}" in lines
    assert "[1/3] priming forward train x=[2,8] on cpu" in lines
    assert any(line.startswith("[3/3] restored forward eval x=[2,8] on cpu (hit") for line in lines)
    assert "\x1b" not in ended.err


def test_warm_for_people(fresh: Template, warmed: Place) -> None:
    """A table that fits a terminal of 80 columns."""
    ended = fresh.command("warm", *warmed.words)
    assert "3 targets: 3 local" in ended.out
    assert all(len(line) <= 80 for line in ended.out.splitlines())


def test_restore_and_publish(fresh: Template, warmed: Place) -> None:
    """Restored, then found; published, then there already; what is missing is named, exit code 3."""
    shutil.rmtree(warmed.root)
    told = fresh.command("restore", *warmed.words, "--json").json
    assert set(told) >= {
        "fingerprint", "targets", "local", "restored", "files", "bytes", "seconds", "missing",
        "faults",
    }  # fmt: skip
    assert (told["targets"], told["restored"], told["missing"]) == (3, 3, [])
    again = fresh.command("restore", *warmed.words)
    assert again.code == 0
    assert again.out.startswith("3 targets: 3 local, 0 restored")
    other = (*warmed.words[:-1], warmed.folder / "second")
    sent = fresh.command("publish", *other, "--json")
    assert (sent.code, len(sent.json["published"]), sent.json["missing"]) == (0, 3, [])
    assert fresh.command("publish", *other).out.startswith("0 published, 3 there already")
    warmed.write(plan("two_layer", [2, 7]))
    for name in ("restore", "publish"):
        ended = fresh.command(name, *warmed.words, "--json")
        assert ended.code == 3
        assert ended.json["missing"] == ["forward train x=[7,8] on cpu"]


def test_ls_and_fingerprint(fresh: Template, warmed: Place) -> None:
    """A store by fingerprint, one fingerprint by target; the first digits are enough (unsloth#10528)."""
    mark = fresh.command("fingerprint", warmed.plan_file, "--device", "cpu", "--json").json
    assert set(mark) >= {"digest", "components"}
    all_marks = fresh.command("ls", "--store", warmed.store, "--json").json
    assert [row["fingerprint"] for row in all_marks["fingerprints"]] == [mark["digest"]]
    assert all_marks["fingerprints"][0]["targets"] == 3
    one = fresh.command("ls", mark["digest"][:6], "--store", warmed.store, "--json").json
    assert len(one["targets"]) == 3
    assert set(one["targets"][0]) == {
        "key", "generation", "created", "files", "file_bytes", "pack_bytes"
    }  # fmt: skip
    people = fresh.command("fingerprint", warmed.plan_file, "--device", "cpu").out
    assert people.startswith(mark["digest"])
    assert "cpu.threads" in people
    assert mark["digest"][:12] in fresh.command("ls", "--store", warmed.store).out
    assert_one_error(fresh.command("ls", "zz", "--store", warmed.store), 2, "0 fingerprints")
    empty = fresh.command("ls", "--store", warmed.folder / "nothing", "--json")
    assert (empty.code, empty.json["fingerprints"]) == (0, [])


def test_warm_and_verify_at_once(fresh: Template, warmed: Place) -> None:
    """Data stays JSON when the proof is asked for as well."""
    ended = fresh.command("warm", *warmed.words, "--verify", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["targets"]


# -- how they leave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CompileCacheError("x", next_step="y"), 1),
        (StoreUnavailable("x", next_step="y"), 1),
        (CompileFailed("x", next_step="y", target="t"), 1),
        (PlanError("x", next_step="y"), 2),
        (UnexpectedCompile("x", next_step="y", target="t"), 3),
        (FingerprintMismatch("x", next_step="y"), 3),
        (ChecksumMismatch("x", next_step="y"), 4),
        (UntrustedArtifact("x", next_step="y"), 4),
        (UnsafePath("x", next_step="y", path="p"), 4),
        (LockTimeout("x", next_step="y", holder="h"), 5),
    ],
)
def test_exit_codes(error: CompileCacheError, code: int) -> None:
    """As documented; every message ends with the next step."""
    assert exit_code(error) == code
    assert str(error) == "x. y."


GOOD = "specs: [{example: {x: {shape: [2, 8], dtype: float32}}}]\n"

PLANS = {
    "unknown module": ("workload: nowhere:at_all\n" + GOOD, "no module named 'nowhere'"),
    "unknown attribute": ("workload: workloads:nothing\n" + GOOD, "no workload 'nothing'"),
    "no attribute": ("workload: workloads\n" + GOOD, "module:attribute"),
    "no workload": (GOOD, "names no workload"),
    "unknown preset": (
        "workload: dflash_model.workload:dflash\nsettings: {preset: giant}\n" + GOOD,
        "giant",
    ),
    "unknown setting": (
        "workload: dflash_model.workload:dflash\nsettings: {preset: tiny, colour: red}\n" + GOOD,
        "colour",
    ),
    "settings of an instance": ("workload: workloads:product\nsettings: {a: 1}\n" + GOOD, "a"),
    "unknown field": ("workload: workloads:product\nspecs: [{phaze: train}]\n", "'phase'"),
    "unknown phase": ("workload: workloads:product\nspecs: [{phase: nap}]\n", "phase"),
    "unknown dtype": (
        "workload: workloads:product\nspecs: [{example: {x: {shape: [2], dtype: float99}}}]\n",
        "float99",
    ),
    "no example": ("workload: workloads:product\nspecs: [{dims: {seq_len: 8}}]\n", "no example"),
    "no specs": ("workload: workloads:product\nspecs: []\n", "specs"),
    "specs left out": ("workload: workloads:product\n", "specs"),
    "length 0": (
        "workload: dflash_model.workload:tiny\nspecs: [{dims: {seq_len: 0}}]\n",
        "seq_len",
    ),
    "length past the maximum": (
        "workload: dflash_model.workload:tiny\nspecs: [{dims: "
        "{seq_len: 99999999, batch: 1, anchors: 8, block: 4, mask: mixed}}]\n",
        "seq_len",
    ),
    "mask of another length": (
        "workload: dflash_model.workload:tiny\nspecs: [{dims: "
        "{seq_len: 128, batch: 1, anchors: 8, block: 4, mask: mixed, mask_q_len: 7}}]\n",
        "mask_q_len",
    ),
    "another format": ("format: 2\nworkload: workloads:product\n" + GOOD, "format"),
    "no mapping": ("- 1\n", "no mapping"),
    "no YAML": ("{: [\n", "not YAML"),
    "bytes": ("\x00\x01", "not YAML"),
    "empty": ("", "no mapping"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_bad_plan(fresh: Template, place: Place, name: str) -> None:
    """One error that names the field and the file or the part that does not exist; exit code 2."""
    text, word = PLANS[name]
    place.plan_file.write_text(text)
    assert_one_error(fresh.command("warm", *place.words), 2, word)


def test_bad_words(fresh: Template, place: Place) -> None:
    """Of the command line itself: files, devices, limits, stores, options."""
    place.write(plan("product", [2, 3, 4]))
    bad = {
        ("warm", place.folder / "absent.yaml"): ("cannot be read", "compilecache plan"),
        ("warm", place.folder): ("directory",),
        ("warm", place.plan_file, "--device", "cuda:7"): ("no device 'cuda:7'", "cpu"),
        ("warm", place.plan_file, "--device", "tpu"): ("no device 'tpu'",),
        ("warm", place.plan_file, "--device", "cuda:x"): ("no device 'cuda:x'",),
        ("warm", place.plan_file, "--device", ","): ("device",),
        ("warm", place.plan_file, "--device", "cpu", "--limit", "2"): ("limit of 2", "--limit"),
        ("warm", place.plan_file, "--lock-timeout", "-1"): ("--lock-timeout",),
        ("warm", place.plan_file, "--colour"): ("--colour",),
        ("warm", place.plan_file, "--workload", "workloads"): ("module:attribute",),
        ("publish",): ("PLAN", "--from"),
        ("publish", place.plan_file, "--store", "none"): ("--store none",),
        ("ls", "--store", "none"): ("--store none",),
        ("nothing",): ("nothing",),
    }
    for words, needed in bad.items():
        ended = fresh.command(*words, env={"COMPILECACHE_ROOT": str(place.root)})
        assert_one_error(ended, 2, *needed)
    words = ("warm", place.plan_file, "--root", place.root, "--store", "ftp://host/path")
    assert_one_error(fresh.command(*words), 1, "ftp://host/path", "s3://BUCKET")


def test_bad_roots(fresh: Template, place: Place) -> None:
    """Without execution, full, below a file, open to everybody: exit code 4, nothing compiled."""
    place.write(plan("product", [2]))
    (place.folder / "file").touch()
    place.root.mkdir()
    place.root.chmod(0o777)
    for root, word in ((place.folder / "file" / "x", "cannot be written"), (place.root, "chmod")):
        words = ("warm", place.plan_file, "--device", "cpu", "--store", "none", "--root", root)
        assert_one_error(fresh.command(*words), 4, word)
    if os.getuid() == 0:
        for options, word in (("size=99m,noexec", "noexec"), ("size=9m", "MiB free")):
            with tmpfs(place.folder / "mount", f"mode=700,{options}") as mount:
                words = (*words[:-1], mount)
                assert_one_error(fresh.command(*words), 4, word)


def test_a_store_that_is_down(fresh: Template, warmed: Place) -> None:
    """Commands that need it leave with 1 and name it; a file where a folder should be is down too."""
    env = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_MAX_ATTEMPTS": "1",
    }
    occupied = warmed.folder / "occupied"
    occupied.touch()
    other = (*warmed.words[:-1], occupied)
    assert_one_error(fresh.command("publish", *other, "--json"), 1, str(occupied))
    shutil.rmtree(warmed.root)
    assert_one_error(fresh.command("restore", *other, "--json"), 1, str(occupied))
    ended = fresh.command("ls", "--store", "s3://bucket/cache", env=env)
    assert_one_error(ended, 1, "s3://bucket/cache")


def test_a_damaged_pack(fresh: Template, warmed: Place) -> None:
    """Exit code 4, every fault as a warning, the targets named as missing, nothing in the root."""
    shutil.rmtree(warmed.root)
    for path in warmed.store.glob("v1/*/packs/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    ended = fresh.command("restore", *warmed.words, "--json")
    assert ended.code == 4, ended.err
    assert len(ended.json["missing"]) == 3
    assert ended.json["faults"]
    assert not [path for path in warmed.root.rglob("*") if path.suffix in (".so", ".py")]


def test_a_record_of_another_fingerprint(fresh: Template, warmed: Place) -> None:
    """A record that lies where it does not belong is not used."""
    shutil.rmtree(warmed.root)
    for path in warmed.store.glob("v1/*/artifacts/*/1.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "fingerprint": "ab" * 16}))
    ended = fresh.command("restore", *warmed.words, "--json")
    assert ended.code == 4, ended.err
    assert "names another place" in " ".join(ended.json["faults"])


@pytest.mark.parametrize("name", ["/etc/passwd", "../../outside", "ab/../../outside"])
def test_a_record_that_would_leave_the_root(fresh: Template, warmed: Place, name: str) -> None:
    """Refused before a byte is fetched; exit code 4."""
    shutil.rmtree(warmed.root)
    for path in warmed.store.glob("v1/*/artifacts/*/1.json"):
        record = json.loads(path.read_text())
        record["files"][0]["path"] = name
        path.write_text(json.dumps(record))
    ended = fresh.command("restore", *warmed.words, "--json")
    assert ended.code == 4, ended.err
    assert "Traceback" not in ended.err
    assert not (warmed.folder / "outside").exists()


def _closed_pipe(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)
    os.close(writing)
    from processes import command

    command(words)


def test_a_reader_that_goes_away(fresh: Template, warmed: Place) -> None:
    """``compilecache ls | head -1`` is nothing to complain about."""
    ended = fresh.start(_closed_pipe, ["ls", "--store", str(warmed.store), "--json"]).wait()
    assert ended.err == ""


def test_every_command_has_a_page_of_help(fresh: Template) -> None:
    """And an unknown one is said with what there is."""
    for name in COMMANDS:
        assert fresh.command(name, "--help").out.startswith("Usage:")


def test_where_the_fault_is_can_be_seen(fresh: Template) -> None:
    """COMPILECACHE_DEBUG=1 shows the traceback that is kept from people otherwise."""
    words = ("warm", "absent.yaml", "--device", "cpu")
    assert "Traceback" in fresh.command(*words, env={"COMPILECACHE_DEBUG": "1"}).err
    assert "Traceback" not in fresh.command(*words).err
