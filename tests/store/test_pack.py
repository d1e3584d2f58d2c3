"""Packs: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from store_samples import harvest, listed, packed, plant

from compilecache.artifact import FileEntry, file_and_directory, hash_files
from compilecache.errors import ChecksumMismatch, CompileCacheError, UnsafePath
from compilecache.pack import MOST_TIMES, sha256_of, unpack, write_pack, zstd

part = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/\\"),
    min_size=1,
    max_size=60,
).filter(lambda text: text not in (".", "..") and len(text.encode()) < 200)
name = st.lists(part, min_size=1, max_size=4).map("/".join)
trees = st.dictionaries(name, st.binary(max_size=3000), max_size=6).filter(
    lambda tree: file_and_directory(tree) is None
)
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
SMALL = {"a/x.so": bytes(range(256)) * 9, "b/empty": b"", "b/y.json": b"{}" * 300}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory, also for tests that hypothesis runs many times."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def unpacked(
    data: bytes, wanted: dict[str, FileEntry], *, spare_bytes: int = 0
) -> dict[str, bytes]:
    """What unpacking these bytes leaves; also checks that an error leaves nothing."""
    sha256 = sha256_of(io.BytesIO(data))
    with tempfile.TemporaryDirectory() as folder:
        dest = Path(folder, "dest")
        dest.mkdir()
        try:
            unpack(io.BytesIO(data), sha256, wanted, dest, spare_bytes=spare_bytes)
        except (ChecksumMismatch, UnsafePath):
            assert harvest(Path(folder)) == {}
            raise
        return harvest(dest)


@quick
@given(trees)
@example({"é" * 55 + "/" + "é" * 80: b"cut inside a character"})
@example({"n" * 120 + "/" + "m" * 120: b"long names"})
@example({"f": bytes(3 << 20)})
def test_unpacking_a_pack_gives_the_tree(tree: dict[str, bytes]) -> None:
    """Names and contents survive, whatever they are."""
    with tempfile.TemporaryDirectory() as folder:
        pack, entries, info = packed(Path(folder), tree)
        data = pack.read_bytes()
        assert (info.size, info.files) == (len(data), len(tree))
        assert info.sha256 == sha256_of(io.BytesIO(data))
        assert unpacked(data, entries) == tree


@quick
@given(trees)
def test_packing_twice_gives_equal_bytes(tree: dict[str, bytes]) -> None:
    """Order, times and modes of the files do not enter a pack."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "1"), Path(folder, "2")
        first, _, _ = packed(one, tree)
        (two / "tree").mkdir(parents=True)
        plant(two / "tree", dict(reversed(tree.items())))
        for path in (two / "tree").rglob("*"):
            os.utime(path, (1, 1))
            path.chmod(0o755)
        write_pack(two / "tree", reversed(list(tree)), two / "pack")
        assert first.read_bytes() == (two / "pack").read_bytes()


@settings(quick, max_examples=100)
@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    """A pack with one bit changed anywhere unpacks to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        pack, entries, info = packed(Path(folder), SMALL)
        flipped = bytearray(pack.read_bytes())
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        refused(bytes(flipped), info.sha256, entries)


@settings(quick, max_examples=100)
@given(st.data())
def test_where_nobody_vouches_for_a_pack_its_files_are_right_or_refused(
    data: st.DataObject,
) -> None:
    """Of a flipped bit that changes no file nobody needs to know; every other one is found."""
    with tempfile.TemporaryDirectory() as folder:
        pack, entries, _ = packed(Path(folder), SMALL)
        flipped = bytearray(pack.read_bytes())
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        dest = Path(folder, "out")
        dest.mkdir()
        try:
            unpack(io.BytesIO(flipped), None, entries, dest)
        except (ChecksumMismatch, UnsafePath):
            assert harvest(dest) == {}
        else:
            assert harvest(dest) == SMALL


@settings(quick, max_examples=50)
@given(st.data())
def test_a_pack_cut_anywhere_is_refused(data: st.DataObject) -> None:
    """A pack that ends too early, or goes on too long, unpacks to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        pack, entries, info = packed(Path(folder), SMALL)
        whole = pack.read_bytes()
        cut = data.draw(st.integers(0, len(whole) + 3).filter(lambda n: n != len(whole)))
        refused((whole + b"more")[:cut], info.sha256, entries)


def refused(data: bytes, sha256: str, entries: dict[str, FileEntry]) -> None:
    """Unpacking raises ChecksumMismatch and leaves no file."""
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ChecksumMismatch) as caught:
            unpack(io.BytesIO(data), sha256, entries, Path(folder))
        assert caught.value.faults
        assert harvest(Path(folder)) == {}


@settings(quick, max_examples=200)
@given(st.binary(max_size=2000))
def test_fuzzed_archives_raise_only_our_errors(content: bytes) -> None:
    """Anything inside valid zstd is an archive or one of two errors."""
    entry = FileEntry("f", 3, "0" * 32, "0" * 64)
    with pytest.raises((ChecksumMismatch, UnsafePath)):
        unpacked(zstd.compress(content), {"f": entry})


@pytest.mark.parametrize("digits", [b"-0000000001", b"+0000000003", b"00_00000003", b"0o000000003"])
def test_a_size_that_is_no_octal_number_is_damage(digits: bytes) -> None:
    """int() takes signs, underscores and prefixes; of minus one byte nobody would ever see the end."""
    member = tarfile.TarInfo("f")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = digits + b"\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    entry = FileEntry("f", 3, "0" * 32, "0" * 64)
    with pytest.raises(ChecksumMismatch, match="tar header is damaged"):
        unpacked(zstd.compress(bytes(header) + bytes(1024)), {"f": entry})


def archive(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    """A compressed tar of hand-made members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return zstd.compress(buffer.getvalue())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """A tar header."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def entry_of(name: str, content: bytes) -> dict[str, FileEntry]:
    """What a record would list for one file."""
    with tempfile.TemporaryDirectory() as folder:
        size, digest = hash_files(plant(Path(folder), {"f": content}), ["f"])["f"]
    return {name: FileEntry(name, size, digest, "0" * 64)}


@pytest.mark.parametrize(
    "bad",
    [
        member("f", tarfile.SYMTYPE, "/etc/passwd"),
        member("f", tarfile.LNKTYPE, "g"),
        member("f", tarfile.CHRTYPE),
        member("f", tarfile.BLKTYPE),
        member("f", tarfile.FIFOTYPE),
        member("f", tarfile.DIRTYPE),
        member("/tmp/f"),
        member("../f"),
        member("a/../../f"),
        member("a" * 150 + "/../" * 20 + "f"),
        member("f\\g"),
    ],
    ids=lambda info: f"{info.type!r}-{info.name[:12]}",
)
def test_links_devices_and_climbing_names_are_refused(bad: tarfile.TarInfo) -> None:
    """An intact pack with such a member, first or last, is hostile and writes nothing."""
    good = (member("good"), b"fine")
    for members in ([(bad, b""), good], [good, (bad, b"")]):
        with pytest.raises(UnsafePath):
            unpacked(archive(*members), entry_of("good", b"fine"))


def test_a_link_cannot_redirect_a_later_file(scratch: Path) -> None:
    """A directory link in the way, from a pack or from before, is never written through."""
    trap = archive((member("d", tarfile.SYMTYPE, str(scratch)), b""), (member("d/f"), b"x"))
    with pytest.raises(UnsafePath):
        unpacked(trap, entry_of("d/f", b"x"))
    outside, dest = scratch / "outside", scratch / "dest"
    outside.mkdir()
    dest.mkdir()
    (dest / "d").symlink_to(outside)
    data = archive((member("d/f"), b"x"))
    with pytest.raises(UnsafePath):
        unpack(io.BytesIO(data), sha256_of(io.BytesIO(data)), entry_of("d/f", b"x"), dest)
    assert list(outside.iterdir()) == []


def test_nothing_that_exists_is_overwritten(scratch: Path) -> None:
    """A file of the same name stops the unpacking and keeps its content."""
    (scratch / "f").write_bytes(b"mine")
    data = archive((member("f"), b"x"))
    with pytest.raises(FileExistsError):
        unpack(io.BytesIO(data), sha256_of(io.BytesIO(data)), entry_of("f", b"x"), scratch)
    assert harvest(scratch) == {"f": b"mine"}


def test_all_faults_come_in_one_error() -> None:
    """Altered, oversized, unlisted, doubled and missing files are all named."""
    wanted = {}
    for name in ("altered", "longer", "missing", "twice"):
        wanted |= entry_of(name, b"1234")
    data = archive(
        (member("altered"), b"12_4"),
        (member("longer"), b"12345"),
        (member("twice"), b"1234"),
        (member("twice"), b"1234"),
        (member("unlisted"), b"1234"),
    )
    with pytest.raises(ChecksumMismatch) as caught:
        unpacked(data, wanted)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "altered",
        "longer",
        "twice",
        "unlisted",
        "missing",
    ]


def test_unwanted_files_are_skipped_on_request() -> None:
    """A target that needs part of a pack gets that part."""
    data = archive(*((member(name), name.encode()) for name in ("a", "b", "c")))
    assert unpacked(data, entry_of("b", b"b"), spare_bytes=1 << 20) == {"b": b"b"}


@pytest.mark.parametrize("spare_bytes", [0, 1 << 20])
def test_a_bomb_is_not_unpacked(spare_bytes: int) -> None:
    """Of a pack that inflates to 512 MB little more is read than its record lists."""
    head = member("f")
    head.size = 512 << 20
    compressor = zstd.ZstdCompressor()
    parts = [compressor.compress(head.tobuf(tarfile.GNU_FORMAT))]
    parts += [compressor.compress(bytes(1 << 24)) for _ in range(32)]
    data = b"".join([*parts, compressor.flush()])
    with pytest.raises(ChecksumMismatch, match="more than its records list"):
        unpacked(data, entry_of("f", b"x"), spare_bytes=spare_bytes)


def test_a_bomb_that_its_record_vouches_for_is_not_unpacked() -> None:
    """Sizes in a record bound nothing when its author is the enemy: what counts is the ratio."""
    head = member("f")
    head.size = 512 << 20
    compressor = zstd.ZstdCompressor()
    parts = [compressor.compress(head.tobuf(tarfile.GNU_FORMAT))]
    parts += [compressor.compress(bytes(1 << 24)) for _ in range(32)]
    data = b"".join([*parts, compressor.compress(bytes(1024)), compressor.flush()])
    assert len(data) < 1 << 16
    promised = {"f": FileEntry("f", 512 << 20, "0" * 32, "0" * 64)}
    with pytest.raises(ChecksumMismatch, match=f"more than {MOST_TIMES} times its size"):
        unpacked(data, promised)


def test_what_nobody_would_unpack_is_not_packed(scratch: Path) -> None:
    """Said where it is made, not where it is needed; well compressed files up to 64 MiB are fine."""
    (scratch / "tree").mkdir()
    for size, fits in ((48 << 20, True), (256 << 20, False)):
        with (scratch / "tree/zeros").open("wb") as file:
            file.truncate(size)
        if fits:
            write_pack(scratch / "tree", ["zeros"], scratch / "pack")
            continue
        with pytest.raises(CompileCacheError, match="taken for a bomb"):
            write_pack(scratch / "tree", ["zeros"], scratch / "pack2")
    assert {path.name for path in scratch.iterdir()} == {"tree", "pack"}


def test_a_pack_of_too_many_files_is_refused(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones weigh nothing, and still each would take a name and an inode."""
    monkeypatch.setattr("compilecache.pack.MOST_FILES", 10)
    monkeypatch.setattr("compilecache.tarstream.MOST_FILES", 10)
    tree = {f"f{number:02}": b"" for number in range(10)}
    pack, entries, _ = packed(scratch / "ten", tree)
    assert unpacked(pack.read_bytes(), entries) == tree
    many = archive(*((member(f"f{number:02}"), b"") for number in range(21)))
    with pytest.raises(ChecksumMismatch, match="more than 10 files"):
        unpacked(many, entries, spare_bytes=1 << 20)
    with pytest.raises(CompileCacheError, match="11 files"):
        packed(scratch / "eleven", {**tree, "one more": b""})


class Endless:
    """A stream without an end that counts what was read of it."""

    def __init__(self, start: bytes) -> None:
        self._start = start
        self.count = 0

    def read(self, size: int, /) -> bytes:
        """The start, then noise for ever."""
        data, self._start = self._start[:size] or os.urandom(size), self._start[size:]
        self.count += len(data)
        return data


def test_a_pack_without_an_end_is_not_read_for_ever(scratch: Path) -> None:
    """Neither before nor after the end of the archive."""
    whole = archive((member("f"), b"x"))
    for start in (whole, b""):
        stream = Endless(start)
        with pytest.raises(ChecksumMismatch):
            unpack(stream, "0" * 64, entry_of("f", b"x"), scratch)
        assert stream.count < 4 << 20


@pytest.mark.parametrize("tail", [b"x", bytes(512) + b"x" * 512, bytes(1024) + b"x"])
def test_what_follows_the_end_mark_is_refused(tail: bytes) -> None:
    """Bytes hidden behind the last member are a fault."""
    inner = zstd.decompress(archive((member("f"), b"x")))[:1024]
    with pytest.raises(ChecksumMismatch):
        unpacked(zstd.compress(inner + tail), entry_of("f", b"x"))


def test_links_are_not_packed(scratch: Path) -> None:
    """Packing a link raises and leaves no pack behind."""
    plant(scratch / "tree", {"real": b"x"})
    (scratch / "tree/link").symlink_to("real")
    with pytest.raises(UnsafePath):
        write_pack(scratch / "tree", ["real", "link"], scratch / "pack")
    assert [path.name for path in scratch.iterdir()] == ["tree"]


@pytest.mark.skipif(not shutil.which("zstd"), reason="tar needs the zstd program")
def test_tar_reads_a_pack(scratch: Path) -> None:
    """``tar --zstd -xf`` unpacks it, so that nobody depends on this library."""
    tree = SMALL | {"n" * 120 + "/ü": b"long"}
    pack, _, _ = packed(scratch, tree)
    (scratch / "out").mkdir()
    subprocess.run(["tar", "--zstd", "-xf", pack, "-C", scratch / "out"], check=True)
    assert harvest(scratch / "out") == tree


def test_an_empty_pack_is_a_pack(scratch: Path) -> None:
    """No files is an archive too."""
    pack, entries, info = packed(scratch, {})
    assert (entries, info.files) == ({}, 0)
    assert unpacked(pack.read_bytes(), {}) == {}


def test_listed_entries_name_their_pack(scratch: Path) -> None:
    """What a record lists of a fresh pack can be unpacked from it alone."""
    _, _, info = packed(scratch, SMALL)
    entries = listed(scratch / "tree", list(SMALL), info)
    assert {entry.pack for entry in entries.values()} == {info.sha256}
