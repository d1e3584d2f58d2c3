"""Valid samples made invalid: by fields, by headers, by frames, by bytes. All chance is seeded."""

from __future__ import annotations

import copy
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from compilecache.pack import zstd

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

T = TypeVar("T")

NAMES = (
    "..", "../x", "a/../../x", "/etc/passwd", "", ".", "./a", "a//b", "a/", "a\\b", "a\nb", "a\0b",
    "a\x7fb", "\u202ea", "a" * 300, "d/" * 2100 + "f", "é" * 120, "\u0301", "CON", "~", "$HOME/x",
    ".compilecache/lock", ".compilecache/records/x.json", "-rf", "a b", "\uff41", "\ufeffa",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 1.5, -0.0, 1e308,
)  # fmt: skip
TEXTS = (
    *NAMES, "train", "null", "1", "0x10", "2001-99-99", "!!python/object:os.system", "*a", "&a", "<<",
    "\ud800", "\U0001f4a5", "x" * 5_000, "0" * 64, "f" * 32, "cpu", "cuda:-1", "2026-01-31T12:00:00Z\n",
)  # fmt: skip


def bytes_of(chance: random.Random, data: bytes) -> bytes:
    """A few bits, bytes or stretches of it changed."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        changed = bytearray(_one_change(chance, changed))
    return bytes(changed)


def _one_change(chance: random.Random, data: bytearray) -> bytes:
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.choice((1, 2, 8, 64, 512)))
    way = chance.randrange(7)
    if way == 0 and start < len(data):
        data[start] ^= 1 << chance.randrange(8)
        return bytes(data)
    if way == 1 and start < len(data):
        data[start] = chance.choice((0, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        return bytes(data)
    stretch = bytes(data[start:end])
    middle = {
        2: b"",
        3: stretch * 2,
        4: chance.randbytes(len(stretch)),
        5: bytes(len(stretch)),
    }.get(way)
    if middle is None:
        return bytes(data[:start])
    return bytes(data[:start]) + middle + bytes(data[end:])


# -- JSON ----------------------------------------------------------------------------------------


def value(chance: random.Random) -> Json:
    """Anything that may stand in a field."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice((None, True, False, [], {}, [[]], {"": None}))
    if kind == 1:
        return [value(chance) for _ in range(chance.randrange(4))]
    if kind == 2:
        return {str(chance.choice(TEXTS))[:40]: value(chance)}
    return chance.choice(NUMBERS if kind == 3 else TEXTS)


def fields(chance: random.Random, sample: Json) -> Json:
    """The sample with some of its fields changed, dropped, doubled, moved or added."""
    changed = copy.deepcopy(sample)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        if not places:
            return value(chance)
        _change_field(chance, *chance.choice(places))
    return changed


def _places(found: Json) -> list[tuple[dict[str, Json] | list[Json], str | int]]:
    inner: list[tuple[dict[str, Json] | list[Json], str | int]] = []
    if isinstance(found, dict):
        inner = [(found, key) for key in found]
    elif isinstance(found, list):
        inner = [(found, index) for index in range(len(found))]
    for holder, key in list(inner):
        inner += _places(holder[key])  # type: ignore[index, call-overload]
    return inner


def _change_field(
    chance: random.Random, holder: dict[str, Json] | list[Json], key: str | int
) -> None:
    way = chance.randrange(6)
    if isinstance(holder, dict):
        assert isinstance(key, str)
        if way == 0:
            del holder[key]
        elif way == 1:
            holder[chance.choice((key + "s", key.upper(), "", *TEXTS[:5]))] = holder[key]
        elif way == 2:
            holder[key] = [holder[key], holder[key]]
        else:
            holder[key] = _near(chance, holder[key])
    else:
        assert isinstance(key, int)
        if way == 0:
            del holder[key]
        elif way == 1:
            holder.append(copy.deepcopy(holder[key]))
        elif way == 2:
            holder.reverse()
        else:
            holder[key] = _near(chance, holder[key])


def _near(chance: random.Random, old: Json) -> Json:
    if isinstance(old, str) and chance.random() < 0.4:
        changed = bytes_of(chance, old.encode("utf-8", "surrogatepass"))
        return changed.decode("utf-8", "replace")
    if isinstance(old, int) and chance.random() < 0.4:
        return old + chance.choice((-1, 1, 512, -(2**63)))
    return value(chance)


RAW = (
    '{"format":1,"format":1}', "[" * 100_000, '{"a":' * 50_000, "1" * 5_000, '"' + "\\ud800" * 9 + '"',
    "NaN", "1e999", "\ufeff{}", "", " ", "{", '{"format":1,}', "'", "nul", '{"format":' + "9" * 5_000 + "}",
)  # fmt: skip


def text(chance: random.Random, sample: Json) -> bytes:
    """JSON of the changed sample, or something that only begins to be JSON."""
    if chance.random() < 0.03:
        return chance.choice(RAW).encode("utf-8", "surrogatepass")
    changed = sample if chance.random() < 0.2 else fields(chance, sample)
    ascii_only, space = chance.random() < 0.5, chance.choice((None, 1))
    data = json.dumps(changed, ensure_ascii=ascii_only, indent=space).encode(
        "utf-8", "surrogatepass"
    )
    return bytes_of(chance, data) if chance.random() < 0.35 else data


# -- tar and zstd --------------------------------------------------------------------------------

KINDS = tuple(bytes([letter]) for letter in b"\x000123456735LKSVMNDxgAZ\xff")


@dataclass(frozen=True)
class Member:
    """One member of an archive, whatever a header can say of it."""

    name: bytes
    content: bytes
    kind: bytes = tarfile.REGTYPE
    size: bytes | None = None
    """The size field as it stands in the header; None: the content's."""
    link: bytes = b""
    prefix: bytes = b""
    magic: bytes = b"ustar  \0"
    checksum: bool = True
    """Whether it is right."""

    def dump(self) -> bytes:
        """Header, content, padding."""
        size = b"%011o\0" % len(self.content) if self.size is None else self.size
        head = bytearray(512)
        for start, end, data in (
            (0, 100, self.name), (100, 108, b"0000600\0"), (108, 116, b"0000000\0"),
            (116, 124, b"0000000\0"), (124, 136, size), (136, 148, b"00000000000\0"),
            (148, 156, b" " * 8), (156, 157, self.kind), (157, 257, self.link), (257, 265, self.magic),
            (345, 500, self.prefix),
        ):  # fmt: skip
            head[start:end] = data[: end - start].ljust(end - start, b"\0")
        head[148:156] = b"%06o\0 " % (sum(head) + (not self.checksum))
        return bytes(head) + self.content + bytes(-len(self.content) % 512)


SIZES = (
    b"00000000000\0", b"77777777777\0", b"-0000000001\0", b"           \0", b"xxxxxxxxxxx\0", b"\xff" * 12,
    b"\x80" + b"\0" * 11, b"\x80" + b"\xff" * 11, b"\x80\0\0\0\0\0\0\x7f\xff\xff\xff\xff", b"", b"0000000 001\0",
)  # fmt: skip


def members(chance: random.Random, files: dict[str, bytes], outside: str) -> list[Member]:
    """The members of a pack of these files, some of them hostile; ``outside``: where nothing may go."""
    found = [
        member for name, data in sorted(files.items()) for member in _plain(name.encode(), data)
    ]
    for _ in range(chance.choice((0, 1, 1, 2))):
        place = chance.randrange(len(found))
        found[place : place + 1] = _hostile(chance, found[place], outside)
    return found


def _plain(name: bytes, content: bytes) -> list[Member]:
    own = Member(name, content)
    return [own] if len(name) < 100 else [Member(b"././@LongLink", name + b"\0", b"L"), own]


def _hostile(chance: random.Random, old: Member, outside: str) -> list[Member]:
    def choose(*ways: Callable[[], list[Member]]) -> list[Member]:
        return chance.choice(ways)()

    name = chance.choice((*NAMES, f"{outside}/f", f"../{outside.rpartition('/')[2]}/f"))
    raw = name.encode("utf-8", "surrogatepass")
    long = raw + b"\0" * chance.randrange(3)
    pax = b"".join(_pax(k, v) for k, v in (("path", name), ("size", "5"), ("linkpath", outside)))
    return choose(
        lambda: [replace(old, name=raw)],
        lambda: [replace(old, name=chance.randbytes(chance.randrange(1, 100)))],
        lambda: [replace(old, kind=chance.choice(KINDS))],
        lambda: [replace(old, kind=b"2", link=outside.encode(), content=b""), old],
        lambda: [Member(b"a", b"", b"2", link=outside.encode()), replace(old, name=b"a/f")],
        lambda: [replace(old, kind=b"1", link=b"/etc/passwd", content=b"")],
        lambda: [replace(old, size=chance.choice(SIZES))],
        lambda: [replace(old, prefix=raw)],
        lambda: [replace(old, checksum=False)],
        lambda: [replace(old, magic=chance.choice((b"ustar\x0000", b"", b"\xff" * 8)))],
        lambda: [old, old],
        lambda: [Member(b"././@LongLink", long, b"L"), old],
        lambda: [Member(b"././@LongLink", long, b"L")] * 3,
        lambda: [Member(b"././@LongLink", b"x" * 9000, b"L"), old],
        lambda: [Member(b"././@PaxHeader", pax, chance.choice((b"x", b"g"))), old],
        lambda: [Member(old.name, b"", b"S", size=b"00000001000\0"), old],
        lambda: [replace(old, content=bytes_of(chance, old.content))],
        lambda: [],
    )


def _pax(key: str, value: str) -> bytes:
    line = f" {key}={value}\n".encode("utf-8", "surrogatepass")
    length = len(line) + 2
    return str(length + (length > 99)).encode() + line


def packed(chance: random.Random, parts: list[Member]) -> bytes:
    """An archive of these members, compressed, and then some."""
    tar = b"".join(member.dump() for member in parts)
    tar += chance.choice(
        (bytes(1024), bytes(1024), bytes(1024), bytes(512), b"", bytes(10240), b"x")
    )
    if chance.random() < 0.15:
        tar = bytes_of(chance, tar)
    data = _compressed(chance, tar)
    return bytes_of(chance, data) if chance.random() < 0.3 else data


def _compressed(chance: random.Random, tar: bytes) -> bytes:
    way = chance.randrange(12)
    if way == 0:
        cut = chance.randrange(len(tar) + 1)
        return zstd.compress(tar[:cut]) + zstd.compress(tar[cut:])
    if way == 1:
        return zstd.compress(tar) + _skippable(chance)
    if way == 2:
        return _skippable(chance) + zstd.compress(tar)
    if way == 3:
        return _frame(chance) + tar[:200]
    if way == 4:
        zeros = 1 << chance.choice((10, 12, 16, 18, 20, 26) if chance.random() < 0.05 else (10, 16))
        return zstd.compress(tar + bytes(zeros))
    if way == 5 and chance.random() < 0.1:
        options = {
            zstd.CompressionParameter.window_log: 27,
            zstd.CompressionParameter.checksum_flag: 1,
        }
        return zstd.compress(tar, options=options)
    return zstd.compress(tar, level=chance.choice((1, 3)))


def _skippable(chance: random.Random) -> bytes:
    size = chance.choice((0, 8, 2**31, 2**32 - 1))
    return (
        (0x184D2A50 + chance.randrange(16)).to_bytes(4, "little")
        + size.to_bytes(4, "little")
        + b"8" * 8
    )


def _frame(chance: random.Random) -> bytes:
    """The beginning of a frame that promises much: sizes, windows, dictionaries, block types."""
    return (
        b"\x28\xb5\x2f\xfd"
        + chance.randbytes(1)
        + chance.choice((b"\xff" * 9, bytes(9), chance.randbytes(9)))
    )


# -- YAML ----------------------------------------------------------------------------------------

LINES = (
    "settings: &a [*a]", "settings: {a: &a [x, x, x, x, x, x, x, x, x], b: &b [*a, *a, *a, *a, *a, *a, *a, *a], "
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b], d: &d [*c, *c, *c, *c, *c, *c, *c, *c], e: &e [*d, *d, *d, *d, *d, *d, "
    "*d, *d], f: &f [*e, *e, *e, *e, *e, *e, *e, *e], g: &g [*f, *f, *f, *f, *f, *f, *f, *f], "
    "h: [*g, *g, *g, *g, *g, *g, *g, *g]}",
    "settings: !!python/object/apply:os.system ['true']", "lengths: {day: 2001-13-41}", "lengths: {n: " + "9" * 5000 + "}",
    "lengths: {n: 0b_, m: 1:99:99, k: .inf, j: .nan, i: 0x_}", "lengths: {b: !!binary 'x', s: !!set {a, b}}",
    "lengths: {? [a, b] : c, ? {d: e} : f}", "settings: {<<: [1, 2]}", "settings: " + "[" * 3000, "\tformat: 1", "%YAML 9.9",
    "--- {}", "...", "? ", "settings: {1: 2, null: 3, 1.5: 4, true: 5}", "format: 1", "format: 2", "- x", "specs: []",
    "lengths: {d: 2001-01-01, t: 2001-12-14t21:59:43.10-05:00}", "settings: {a: !!timestamp x}", "settings: {a: !!int x}",
    "settings: {a: !!float x, b: !!bool x, c: !!null x}", "x: " + "{a: " * 2000, "\x00", "\x85", "\ud800", "lengths: {=: =}",
)  # fmt: skip


def yaml_text(chance: random.Random, sample: Json, dumped: str) -> bytes:
    """A plan file of the changed sample, as JSON or as YAML with lines that make YAML what it is."""
    if chance.random() < 0.5:
        return text(chance, sample)
    lines = dumped.splitlines()
    for _ in range(chance.choice((0, 1, 1, 2))):
        lines[chance.randrange(len(lines)) : 0] = [chance.choice(LINES)]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return bytes_of(chance, data) if chance.random() < 0.5 else data
