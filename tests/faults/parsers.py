"""The parsers that are fuzzed, their samples, and what holds for whatever they read."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import mutations
import yaml
from workloads import plan

from compilecache.artifact import (
    FileEntry,
    PackInfo,
    Record,
    check_files,
    check_name,
    hash_files,
    is_key,
)
from compilecache.budget import Budget
from compilecache.claims import Claim, Claims
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    PlanError,
    UnsafePath,
    UntrustedArtifact,
)
from compilecache.evidence import Evidence
from compilecache.fingerprint import Fingerprint
from compilecache.pack import sha256_of, unpack, write_pack
from compilecache.shapes import CompileTarget, InputSpec, ShapePlan, TensorSpec
from compilecache.signing import SignKey, load_sign_key, load_trust_key, make_key
from compilecache.storage import MemoryStorage
from compilecache.store import ArtifactStore
from compilecache.tags import Release, SourceFile, Surroundings, Tag, TaggedRecord, parse_entry

FP = "ab" * 16
MOMENT = "2026-01-31T12:00:00Z"


class Parser(ABC):
    """One parser and its samples. ``folder`` is a scratch folder, empty."""

    name: ClassVar[str]
    errors: ClassVar[tuple[type[CompileCacheError], ...]]
    """What it may raise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def make(self, chance: random.Random) -> bytes:
        """One input."""

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Reads it, and asserts what holds for whatever was read."""

    def clean(self) -> None:  # noqa: B027 - most leave nothing anyway
        """Asserts that nothing is left behind, after an error too."""


class Records(Parser):
    """Records of a store."""

    name = "record"
    errors = (ChecksumMismatch, UnsafePath)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        entries = tuple(
            FileEntry(name, 3, "0" * 32, "a" * 64) for name in ("ab/f.so", "fxgraph/x/y", "z")
        )
        seen = Evidence(
            outcome="miss", hits=0, misses=1, bypasses=0, launches=1, launched=("g++ x.cpp",),
            seconds=1.5, again_seconds=0.1,
        )  # fmt: skip
        target = CompileTarget(InputSpec(dims={"seq_len": 128, "mask": "full"}), "cuda:0")
        whole = Record(
            fingerprint=FP, target=target, key=target.key, files=entries, created=MOMENT,
            pack=PackInfo("a" * 64, 100, 3), evidence=seen, environment={"why": "because"},
        )  # fmt: skip
        plain = Record(
            fingerprint=FP, target=None, key="adopted", files=(), pack=None, created=MOMENT
        )
        self._samples = [json.loads(record.dump()) for record in (whole, whole, plain)]

    def make(self, chance: random.Random) -> bytes:
        return mutations.text(chance, chance.choice(self._samples))

    def read(self, data: bytes) -> None:
        record = Record.parse(data)
        assert Record.parse(record.dump()) == record
        assert is_key(record.key)
        for entry in record.files:
            check_name(entry.path)
            assert not entry.path.startswith(".compilecache/")


class Plans(Parser):
    """Plan files."""

    name = "plan"
    errors = (PlanError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        example = InputSpec(
            function="block_mask",
            phase="eval",
            dims={"seq_len": 512, "mask": "full"},
            example={"x": TensorSpec(shape=(2, 8), dtype="float32", stride=(8, 1)), "n": 3},
        )
        made = plan("product", [2, 3])
        plans = [
            made,
            made.model_copy(update={"specs": (example,), "settings": {"layers": [1, 2]}}),
        ]
        self._samples = [(json.loads(p.model_dump_json()), p.dump()) for p in plans]
        self._file = folder / "plan.yaml"

    def make(self, chance: random.Random) -> bytes:
        return mutations.yaml_text(chance, *chance.choice(self._samples))

    def read(self, data: bytes) -> None:
        self._file.write_bytes(data)
        read = ShapePlan.load(self._file)
        assert ShapePlan.parse(yaml.safe_load(read.dump())).specs == read.specs
        with suppress(PlanError):
            assert all(is_key(target.key) for target in read.targets(["cpu", "cuda:0"]))


class Packs(Parser):
    """Packs, with records that agree with them, or with what they were."""

    name = "pack"
    errors = (ChecksumMismatch, UnsafePath)
    FILES: ClassVar = {
        "ab/x.so": bytes(range(256)) * 5,
        "b/empty": b"",
        "b/y.json": b"{}" * 300,
        "n" * 120 + "/" + "m" * 60: b"long name",
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._tree, self._outside = folder / "tree", folder / "outside"
        for name, data in self.FILES.items():
            path = self._tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        info = write_pack(self._tree, self.FILES, folder / "pack")
        self._plain, self._sha256 = (folder / "pack").read_bytes(), info.sha256
        self._wanted = {
            name: FileEntry(name, *found, info.sha256)
            for name, found in hash_files(self._tree, self.FILES).items()
        }
        self._outside.mkdir()
        (self._outside / "mine").write_bytes(b"untouched")
        self._dest = folder / "dest"
        self._known = {path.name for path in folder.iterdir()}

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.2:
            data = mutations.bytes_of(chance, self._plain)
        else:
            parts = mutations.members(chance, self.FILES, str(self._outside))
            data = mutations.packed(chance, parts)
        return chance.choice((b"0", b"1", b"2", b"3")) + data

    def read(self, data: bytes) -> None:
        """The first byte says what the reader knows: the true digest or the old one, spare or not."""
        self._dest.mkdir()
        knows, data = data[0] - ord("0"), data[1:]
        sha256 = sha256_of(io.BytesIO(data)) if knows & 1 else self._sha256
        spare = 1 << 20 if knows & 2 else 0
        unpack(io.BytesIO(data), sha256, self._wanted, self._dest, spare_bytes=spare)
        assert check_files(self._dest, self._wanted.values()) == ()
        assert _files_below(self._dest) == len(self._wanted)

    def clean(self) -> None:
        left = _files_below(self._dest)
        shutil.rmtree(self._dest)
        assert left in (0, len(self._wanted)), "an error left files"
        assert {path.name for path in self.folder.iterdir()} == self._known, "written outside"
        assert [path.name for path in self._outside.iterdir()] == ["mine"], "written outside"
        assert (self._outside / "mine").read_bytes() == b"untouched", "changed outside"


def _files_below(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


class Chains(Parser):
    """Claims: an entry that cannot be read is somebody's all the same."""

    name = "claim"
    errors = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = ArtifactStore(MemoryStorage(uuid.uuid4().hex), Budget("memory://", 5))
        mine = Claims(self._store, FP, place="p" * 32).me
        self._sample = json.loads(mine.model_copy(update={"failures": 1, "beat": 3}).dump())
        self._number = 0

    def make(self, chance: random.Random) -> bytes:
        return mutations.text(chance, self._sample)

    def read(self, data: bytes) -> None:
        self._number += 1
        key = f"key{self._number}"
        self._store.create(FP, f"claims/{key}/1.json", data)
        waiting = Claims(self._store, FP, lease=0)
        sight = waiting.look(key)
        assert sight is not None and str(sight.claim)
        Claim.model_validate_json(sight.claim.dump())
        held = waiting.take(key, again=True)
        assert held is not None or waiting.hopeless(key)
        for generation in (1, 2):
            self._store.storage.delete(f"v1/{FP}/claims/{key}/{generation}.json")


class KeyFiles(Parser):
    """Files of private and public keys, and signatures."""

    name = "key"
    errors = (PlanError, UntrustedArtifact)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_key(folder / "key")
        self._own: SignKey = load_sign_key(folder / "key")
        self._signature = self._own.sign(b"data")
        samples = [(folder / name).read_bytes() for name in ("key", "key.pub")]
        import base64

        self._samples = [
            *samples,
            base64.b64encode(self._own.raw),
            base64.b64encode(self._own.public.raw),
        ]
        self._file = folder / "other"
        self._file.touch(mode=0o600)

    def make(self, chance: random.Random) -> bytes:
        which = chance.randrange(5)
        if which == 4:
            return b"s" + mutations.bytes_of(chance, self._signature)
        return chance.choice((b"p", b"t")) + mutations.bytes_of(chance, self._samples[which])

    def read(self, data: bytes) -> None:
        kind, data = data[:1], data[1:]
        if kind == b"s":
            assert self._own.public.verifies(data, b"data") == (data == self._signature)
            return
        self._file.write_bytes(data)
        if kind == b"p":
            load_sign_key(self._file).sign(b"data")
        else:
            load_trust_key(self._file).verifies(self._signature, b"data")


class Fingerprints(Parser):
    """What digests stand for."""

    name = "fingerprint"
    errors = (PlanError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sample = json.loads(Fingerprint({"torch": "2.13", "cpu": "x86", "env.A": "1"}).dump())

    def make(self, chance: random.Random) -> bytes:
        return mutations.text(chance, self._sample)

    def read(self, data: bytes) -> None:
        read = Fingerprint.parse(data.decode(errors="replace"))
        assert Fingerprint.parse(read.dump()) == read
        assert len(read.digest) == 32
        read.diff(Fingerprint({"torch": "2.11"}))


class Tags(Parser):
    """Known-good states, and releases of them."""

    name = "tag"
    errors = (ChecksumMismatch,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        mark = Fingerprint({"torch": "2.13", "cpu": "x86"})
        around = Surroundings(
            python="3.11.7",
            packages={"torch": "2.13.0", "mine": "1.0"},
            origins={"mine": "git+https://example.org/mine@abc"},
            variables={"OMP_NUM_THREADS": "2"},
            sources=(SourceFile(module="m", digest="d", path="m.py", commit="a" * 40),),
        )
        record = TaggedRecord(
            key="cpu-forward-train-1", generation=2, sha256="a" * 64, files=3, bytes=9
        )
        tag = Tag(
            name="good", created=MOMENT, fingerprint=mark.digest, components=mark.components,
            records=(record,), plan=plan("product", [2]), tokens_per_second=5.5, surroundings=around,
        )  # fmt: skip
        release = Release(name="good", generation=3, created=MOMENT, releases=(1, 2))
        self._samples = [json.loads(entry.dump()) for entry in (tag, tag, tag, release)]

    def make(self, chance: random.Random) -> bytes:
        return mutations.text(chance, chance.choice(self._samples))

    def read(self, data: bytes) -> None:
        entry = parse_entry(data)
        assert parse_entry(entry.dump()) == entry
        if isinstance(entry, Tag):
            assert all(is_key(record.key) for record in entry.records)
            lines = entry.surroundings.constraints.splitlines()
            assert len(lines) == len(entry.surroundings.packages)
            assert not any(line.startswith("-") for line in lines)


PARSERS: dict[str, type[Parser]] = {
    parser.name: parser for parser in (Records, Plans, Packs, Chains, Tags, KeyFiles, Fingerprints)
}
SHARES = {"record": 30, "plan": 15, "pack": 35, "claim": 5, "tag": 5, "key": 5, "fingerprint": 5}
"""Percent of all inputs."""
