"""Records: what is refused, and how plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import FINGERPRINT, TARGET, plant

from compilecache.artifact import FileEntry, PackInfo, Record, check_files, hash_files
from compilecache.errors import ChecksumMismatch, UnsafePath
from compilecache.evidence import Evidence
from compilecache.shapes import CompileTarget, InputSpec

UNSAFE = [
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "",
    "a//b",
    "./a",
    "a/",
    "a\\b",
    "a\nb",
    "a\0b",
    "a\x7fb",
    "a\udcffb",
    "a" * 5000,
]
PACK = PackInfo(sha256="0" * 64, size=9, files=1)
EVIDENCE = Evidence(
    outcome="hit", hits=1, misses=0, bypasses=0, launches=0, seconds=1.5, again_seconds=0.1
)

names = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/\\"), min_size=1, max_size=8
).filter(lambda part: part not in (".", ".."))
hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
entries = st.builds(
    FileEntry,
    path=names,
    size=st.integers(0, 2**40),
    xxh3_128=hexes.map(lambda text: text[:32]),
    pack=hexes,
)
records = st.builds(
    Record,
    fingerprint=hexes,
    target=st.just(TARGET),
    key=st.just(TARGET.key),
    generation=st.integers(1, 1000),
    files=st.lists(entries, unique_by=lambda e: e.path, max_size=4).map(lambda e: tuple(sorted(e))),
    pack=st.none(),
    evidence=st.none() | st.just(EVIDENCE),
    environment=st.none() | st.dictionaries(names, names, max_size=2),
)


def record_of(**changes: object) -> Record:
    """A valid record with some fields changed."""
    fields = {
        "fingerprint": FINGERPRINT,
        "target": TARGET,
        "key": TARGET.key,
        "files": (FileEntry("a/b", 3, "1" * 32, PACK.sha256),),
        "pack": PACK,
        "evidence": EVIDENCE,
    }
    return Record.model_validate(fields | changes)


def altered(**changes: object) -> bytes:
    """The bytes of a valid record with some fields of its JSON replaced."""
    return json.dumps(json.loads(record_of().dump()) | changes).encode()


@given(records)
def test_parse_gives_back_what_was_dumped(record: Record) -> None:
    """Reading a record and writing it again changes neither value nor bytes."""
    again = Record.parse(record.dump())
    assert again == record
    assert again.dump() == record.dump()


def test_the_target_comes_back_as_a_target() -> None:
    """A parsed record knows its target as the plan does, key and spec digest included."""
    target = Record.parse(record_of().dump()).target
    assert isinstance(target, CompileTarget)
    assert isinstance(target.spec, InputSpec)
    assert target == TARGET


@given(st.data())
def test_a_cut_record_is_refused(data: st.DataObject) -> None:
    """A record that ends anywhere before its last brace is damaged, in words."""
    whole = record_of().dump()
    cut = data.draw(st.integers(0, len(whole) - 2))
    with pytest.raises(ChecksumMismatch, match="damaged"):
        Record.parse(whole[:cut])


@given(st.data())
def test_changed_bytes_raise_only_our_errors(data: st.DataObject) -> None:
    """Whatever a few bytes become, the answer is a record or one of two errors."""
    whole = bytearray(record_of().dump())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    only_our_errors(bytes(whole))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(Record.model_fields)), json_values)
def test_changed_fields_raise_only_our_errors(field: str, value: object) -> None:
    """Whatever a field becomes, the answer is a record or one of two errors."""
    only_our_errors(altered(**{field: value}))


@given(st.binary(max_size=200))
def test_garbage_raises_only_our_errors(data: bytes) -> None:
    """Bytes that never were a record are refused."""
    with pytest.raises(ChecksumMismatch):
        Record.parse(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"format":1,"size":' + b"9" * 10_000 + b"}",
        b'{"format":1,"fingerprint":NaN}',
        b'{"format":true}',
        b"<html>Sign in</html>",
        b"",
        b"\xff\xfe",
    ],
)
def test_hostile_json_raises_only_our_errors(data: bytes) -> None:
    """Deep nesting, huge numbers, NaN and web pages are damage, not crashes."""
    with pytest.raises(ChecksumMismatch):
        Record.parse(data)


def only_our_errors(data: bytes) -> None:
    """Parses; passes when a record or an error of ours comes out, without pydantic's wording."""
    try:
        Record.parse(data)
    except (ChecksumMismatch, UnsafePath) as error:
        assert "pydantic" not in str(error)
        assert str(error).endswith(".")


def test_another_format_is_said_plainly() -> None:
    """A record of a later version asks for an upgrade instead of listing fields."""
    with pytest.raises(ChecksumMismatch, match=r"format 2.*reads 1\. Upgrade"):
        Record.parse(altered(format=2, novelty=True))


def test_all_faults_of_a_record_are_named() -> None:
    """Two bad fields are two faults in one error."""
    with pytest.raises(ChecksumMismatch) as caught:
        Record.parse(altered(generation=0, created="yesterday"))
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_refused(name: str) -> None:
    """Neither an entry made here nor one read from a record may leave the cache root."""
    with pytest.raises(UnsafePath):
        FileEntry(name, 1, "0" * 32, "0" * 64)
    if "\udcff" not in name:
        file = {"path": name, "size": 1, "xxh3_128": "0" * 32, "pack": "0" * 64}
        with pytest.raises(UnsafePath):
            Record.parse(altered(files=[file]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": "cuda1-forward-train-0123456789"}, "does not belong"),
        ({"key": "adopted"}, "does not belong"),
        ({"target": None}, "does not belong"),
        ({"target": None, "key": "adopted/../x"}, "key"),
        ({"pack": {"sha256": "0" * 64, "size": 9, "files": 2}}, "holds 2 files, but 1"),
        ({"fingerprint": "../x"}, "fingerprint"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], said: str) -> None:
    """A record whose parts do not fit together is damaged."""
    with pytest.raises(ChecksumMismatch, match=said):
        Record.parse(altered(**changes))


@pytest.mark.parametrize("paths", [("b", "a"), ("a", "a"), ("a", "a/b"), ("a", "a/b/c")])
def test_names_that_cannot_coexist_are_refused(paths: tuple[str, ...]) -> None:
    """Files come sorted, once each, and none is also a directory."""
    files = [{"path": p, "size": 1, "xxh3_128": "0" * 32, "pack": "1" * 64} for p in paths]
    with pytest.raises(ChecksumMismatch):
        Record.parse(altered(files=files, pack=None))


def test_same_content_ignores_when_and_how() -> None:
    """Two publishers of the same files agree although time, evidence and machine differ."""
    one = record_of()
    other = record_of(
        created="2020-01-01T00:00:00Z", evidence=None, generation=7, environment={"host": "b"}
    )
    assert one.same_content(other)
    files = (FileEntry("a/b", 3, "2" * 32, PACK.sha256),)
    assert not one.same_content(record_of(files=files))


def test_check_files_names_every_fault(tmp_path: Path) -> None:
    """Missing, longer, altered and linked files are all listed; the good one is not."""
    files = {f"d/{name}": name.encode() * 9 for name in ("good", "gone", "long", "flip", "link")}
    plant(tmp_path, files)
    found = hash_files(tmp_path, files)
    expected = [FileEntry(name, *found[name], "0" * 64) for name in files]
    assert check_files(tmp_path, expected) == ()
    (tmp_path / "d/gone").unlink()
    (tmp_path / "d/long").write_bytes(b"long" * 10)
    (tmp_path / "d/flip").write_bytes(b"flop" * 9)
    (tmp_path / "d/link").unlink()
    (tmp_path / "d/link").symlink_to(tmp_path / "d/good")
    faults = check_files(tmp_path, expected)
    assert [fault.split(":")[0] for fault in faults] == ["d/gone", "d/long", "d/flip", "d/link"]


def test_links_on_the_way_are_refused(tmp_path: Path) -> None:
    """A directory that is a link is not followed, neither when hashing nor when checking."""
    plant(tmp_path / "outside", {"f": b"x"})
    root = tmp_path / "root"
    root.mkdir()
    (root / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePath):
        hash_files(root, ["d/f"])
    assert len(check_files(root, [FileEntry("d/f", 1, "0" * 32, "0" * 64)])) == 1
