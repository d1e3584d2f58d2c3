"""The file of one program: what it is and what it depends on, as JSON, then the compiled function.

``compilecache-program 1\\n``, the length of the header in 8 bytes, the header, the function. Files are
named by their content, so two of one name are equal. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compilecache.errors import ChecksumMismatch
from compilecache.files import replacing
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import InputSpec

FOLDER = "programs"
SUFFIX = ".program"
MAGIC = b"compilecache-program 1\n"
LARGEST_HEADER = 64 * 2**20


@dataclass(frozen=True, slots=True, order=True)
class Condition:
    """One thing that must be as it was when a program was compiled."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    source: str
    """The expression that gives it, as torch writes it: ``self.scale``, ``G['SCALE']``."""
    value: str
    """What it was, in words."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What the canary compares of one tensor."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    elements: int
    norm: float
    products: tuple[float, ...]
    """With fixed random signs."""


class _Sealed(TypedDict):
    size: int
    xxh3_128: str


class Header(BaseModel):
    """What a program is good for."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    spec: InputSpec
    """What it was compiled for."""
    device: str
    """Where, with the index: "cuda:0"."""
    hardware: str
    """GPU name, capability and number of processors; "cpu"."""
    torch: str
    """Version and git hash of torch."""
    parameters: str
    """Digest of names, shapes, dtypes, strides, ties and requires_grad of parameters and buffers."""
    sources: dict[str, str]
    """Python modules that were traced → digest of their syntax trees."""
    imports: dict[str, str]
    """Names under which torch imports modules for it."""
    state: dict[str, str]
    """Grad mode, autocast, default dtype and the like."""
    conditions: tuple[Condition, ...]
    """Attributes and globals that the trace read."""
    unchecked: tuple[str, ...] = ()
    """Expressions that the trace depended on and that nobody can look up again."""
    settled: dict[str, str] = {}
    """Kernels that torch builds while loading → the configuration that was fastest."""
    reference: dict[str, Summary] | None = None
    """What the canary expects on another device; None where there is no other."""
    profile: GpuProfile | None = None
    """The GPU it was compiled for where there was none; None once it has run on one."""
    size: Annotated[int, Field(ge=0)]
    """Bytes of the function."""
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Of the function."""


def sealed(data: bytes) -> _Sealed:
    """The fields of a header that say which bytes follow it."""
    return {"size": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


def write_program(root: Path, header: Header, data: bytes) -> str:
    """Writes a program below the cache root. Returns its name relative to that."""
    head = header.model_dump_json().encode()
    name = xxhash.xxh3_128(head + data).hexdigest()
    path = f"{FOLDER}/{name}{SUFFIX}"
    (root / FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(root / path) as file:
        file.write(MAGIC + len(head).to_bytes(8, "big") + head + data)
    return path


def read_program(path: Path) -> tuple[Header, bytes]:
    """Header and function, checked. Raises ChecksumMismatch for a file that is damaged."""
    content = path.read_bytes()
    header, start = _header(path, content)
    data = content[start:]
    if len(data) != header.size or sealed(data)["xxh3_128"] != header.xxh3_128:
        raise _damaged(path, f"{len(data)} bytes where {header.size} were written, or others")
    return header, data


def read_header(path: Path) -> Header:
    """The header alone. Raises ChecksumMismatch."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 8)
        length = int.from_bytes(start[len(MAGIC) :], "big")
        return _header(path, start + file.read(min(length, LARGEST_HEADER)))[0]


def program_among(files: Collection[str]) -> str | None:
    """The program among the files of a record; None for a target that goes by trace."""
    return next((path for path in files if path.startswith(f"{FOLDER}/")), None)


def _header(path: Path, content: bytes) -> tuple[Header, int]:
    start = len(MAGIC) + 8
    if not content.startswith(MAGIC) or len(content) < start:
        raise _damaged(path, "it does not begin as a program of format 1 does")
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    if end > len(content) or end - start > LARGEST_HEADER:
        raise _damaged(path, "its header is cut off")
    try:
        return Header.model_validate_json(content[start:end]), end
    except ValidationError as error:
        raise _damaged(path, f"its header is not one: {error.errors()[0]['msg']}") from None


def _damaged(path: Path, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"program '{path}' is damaged: {what}",
        next_step="Run 'compilecache warm' with the same plan: it mends what is missing",
        faults=(f"{path.name}: {what}",),
    )
