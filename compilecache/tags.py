"""Known-good states: a tag names what a working run used, exactly. Its values and its bytes.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from compilecache.artifact import Count, Sha256, is_key, utc_now
from compilecache.errors import ChecksumMismatch, PlanError
from compilecache.fingerprint import Fingerprint
from compilecache.shapes import ShapePlan

TAG_FORMAT: Final = 1
MOST_RECORDS: Final = 1 << 17
NOTE_LETTERS: Final = 2000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")
_CREATED = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"

# What is printed as a command, or written to a file that pip reads, holds no more than its kind does.
PACKAGE: Final = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
VERSION: Final = r"^[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}$"
ADDRESS: Final = r"^[A-Za-z][A-Za-z0-9+.-]*:[!-~]{1,2000}$"
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
Package = Annotated[str, Field(pattern=PACKAGE)]

Name = Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]
Generation = Annotated[int, Field(ge=1, le=10**9)]


class TaggedRecord(BaseModel):
    """A record that the run used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """The target's key."""
    generation: Generation
    """Which of its records; a younger one does not stand in."""
    sha256: Sha256
    """Of the record's bytes in the store; they name every file and pack by its digest."""
    files: Count
    """How many files it needs."""
    bytes: Count
    """What they weigh restored."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not is_key(self.key):
            raise ValueError("this is no key of a record")
        return self


class SourceFile(BaseModel):
    """A Python module that was traced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    digest: str
    """Of its whole syntax tree: comments, docstrings and blank lines do not count."""
    path: str | None = None
    """Relative to the git work tree; None outside of one."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")] | None = None
    """That was checked out; None outside of a git work tree."""
    changed: bool = False
    """Whether the file had changes that the commit does not hold."""


class Surroundings(BaseModel):
    """What a process ran in, beyond what a fingerprint says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    """Full version."""
    packages: dict[Package, Annotated[str, Field(pattern=VERSION)]]
    """Installed distributions, as the package index spells them → version."""
    origins: dict[Package, Annotated[str, Field(pattern=ADDRESS)]] = Field(default_factory=dict)
    """Of those that came from an address instead of an index → the address, with the commit."""
    variables: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field(default_factory=dict)
    """Environment variables that torch, Triton, CUDA and threads read, and that were set."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Settings of torch that hide damage, as they were."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that were visible, by index."""
    sources: tuple[SourceFile, ...] = ()

    @property
    def constraints(self) -> str:
        """The installed distributions as the text of a constraints file."""
        lines = []
        for name, version in sorted(self.packages.items()):
            origin = self.origins.get(name, "")
            if origin.startswith("file:"):
                lines.append(f"# {name} {version} was installed from a folder")
            else:
                lines.append(f"{name} @ {origin}" if origin else f"{name}=={version}")
        return "\n".join([*lines, ""])


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = TAG_FORMAT
    name: Name
    generation: Generation = 1
    """Counts up from 1."""
    created: Annotated[str, Field(pattern=_CREATED)] = Field(default_factory=utc_now)
    """UTC."""

    def dump(self) -> bytes:
        """Canonical JSON: equal entries are equal bytes."""
        fields = self.model_dump(mode="json")
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


class Tag(_Entry):
    """What one working run used. Created once, never changed."""

    note: Annotated[str, Field(max_length=NOTE_LETTERS)] = ""
    """Whatever whoever made it wanted to say."""
    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What the run was measured to do; None when nobody said."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{8,128}$")]
    """Digest that the records are kept under."""
    components: dict[str, str]
    """What that digest stands for."""
    records: Annotated[tuple[TaggedRecord, ...], Field(min_length=1, max_length=MOST_RECORDS)]
    devices: tuple[str, ...] = ()
    """With their indices."""
    plan: ShapePlan | None = None
    """None when it was not known."""
    surroundings: Surroundings

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mark.digest != self.fingerprint:
            raise ValueError("the components have another digest")
        keys = [record.key for record in self.records]
        if keys != sorted(set(keys)):
            raise ValueError("records are not sorted by key, or one is named twice")
        return self

    @property
    def mark(self) -> Fingerprint:
        """What the run's artifacts are kept under."""
        return Fingerprint(self.components)

    @property
    def full_name(self) -> str:
        """The name that means this one even after the next is made."""
        return f"{self.name}@{self.generation}"

    @property
    def bytes(self) -> int:
        """What its records weigh restored; files that several need count for each."""
        return sum(record.bytes for record in self.records)


class Release(_Entry):
    """Says that tags of this name are not needed any more; ``gc`` then takes what they kept."""

    releases: Annotated[tuple[Generation, ...], Field(min_length=1)]
    """Generations of the name."""


Entry = Tag | Release


class LaterFormat(ChecksumMismatch):
    """A tag that a later version of compilecache wrote."""


def parse_entry(data: bytes) -> Entry:
    """Reads a tag or a release.

    Raises ChecksumMismatch for one that is damaged, LaterFormat for another format version.
    """
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise _damaged(f"not JSON: {error}") from None
    version = fields.get("format") if isinstance(fields, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise _damaged("no format number; this is no tag")
    if version != TAG_FORMAT:
        raise LaterFormat(
            f"tag has format {version}, this version of compilecache reads {TAG_FORMAT}",
            next_step="Upgrade compilecache, or tag a working run again with this version",
            faults=(f"format {version}",),
        )
    kind: type[Tag | Release] = Release if "releases" in fields else Tag
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise _damaged(f"{where}: {found['msg']}" if where else found["msg"]) from None


def _damaged(fault: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"tag is damaged: {fault}",
        next_step="Name an older one (NAME@GENERATION), or tag a working run again",
        faults=(fault,),
    )


def parse_name(text: str) -> tuple[str, int | None]:
    """Name and generation of "NAME" or "NAME@2". Raises PlanError."""
    name, at, generation = text.partition("@")
    if not _NAME.fullmatch(name) or (at and not re.fullmatch(r"[1-9][0-9]{0,8}", generation)):
        raise PlanError(
            f"{text[:120]!a} cannot name a tag",
            next_step="Use letters, digits and . _ + = -, at most 100, beginning with a letter or "
            "digit; an older one is NAME@GENERATION",
            field="NAME",
        )
    return name, int(generation) if at else None


def plan_changes(then: ShapePlan, now: ShapePlan) -> Mapping[str, tuple[str, str]]:
    """Field of a plan → (then, now), in words, wherever the two differ."""
    changed: dict[str, tuple[str, str]] = {}
    for field in ("workload", "settings", "compile_options", "engine"):
        pair = (str(getattr(then, field)), str(getattr(now, field)))
        if pair[0] != pair[1]:
            changed[field] = pair
    for spec in then.specs:
        if spec not in now.specs:
            changed[str(spec)] = ("planned", "not planned")
    for spec in now.specs:
        if spec not in then.specs:
            changed[str(spec)] = ("not planned", "planned")
    return changed
