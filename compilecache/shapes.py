"""Input specs, shape plans and compile targets: what will be compiled, known before the run.

A plan is a YAML file that people read and edit. Its JSON Schema ships with the package as
``compilecache/schemas/plan.schema.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from compilecache.documents import read_yaml
from compilecache.errors import PlanError

PLAN_FORMAT: Final = 1
TARGET_LIMIT = 4096

FUNCTION_LETTERS = 100
"""Of a function's name, in the key of a target."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+@=-]")

Phase = Literal["train", "eval", "both"]
EngineName = Literal["trace", "program", "auto"]
Size = PositiveInt
Kind = Annotated[str, Field(min_length=1)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Value):
    """One tensor argument of a plain example: sizes in elements, torch's name of the dtype."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    stride: tuple[NonNegativeInt, ...] | None = None
    requires_grad: bool = False


Argument = Annotated[TensorSpec | JsonValue, Field(union_mode="left_to_right")]


class InputSpec(_Value):
    """What makes one compiled graph of a workload."""

    function: str = "forward"
    """Which of the workload's separately compiled functions: "forward", "block_mask", …"""
    phase: Phase = "train"
    """train: forward and backward. eval: under ``torch.no_grad``. both: serves both, no gradient."""
    dtype: str = "float32"
    """torch's name of the floating dtype of parameters and inputs."""
    dims: dict[str, Size | Kind] = Field(default_factory=dict)
    """Named dimensions: sizes in elements (seq_len, batch, anchors, block) or kinds (mask)."""
    example: dict[str, Argument] | None = None
    """Arguments of a plain example, for modules without named dimensions."""
    positional: NonNegativeInt = 0
    """How many of them, from the first on, are passed by position: to torch that is another call."""

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """10 hex digits over the content, stable across processes and machines."""
        content = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def size(self, dim: str) -> int:
        """The size of a named dimension. Raises PlanError when absent or not a number."""
        value = self.dims.get(dim)
        if not isinstance(value, int):
            raise PlanError(
                f"spec '{self}' has no size '{dim}'",
                next_step=f"Add '{dim}: <number>' under its dims",
                field=dim,
            )
        return value

    def __str__(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in self.dims.items())
        example = " ".join(f"{k}={_brief(v)}" for k, v in (self.example or {}).items())
        return " ".join(part for part in (self.function, self.phase, dims, example) if part)


def _brief(value: TensorSpec | JsonValue) -> str:
    return f"[{','.join(map(str, value.shape))}]" if isinstance(value, TensorSpec) else repr(value)


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """One spec on one device: the unit that is compiled, packed, published and restored."""

    spec: InputSpec
    """What is compiled."""
    device: str
    """Where, with its index as the trainer will use it: "cuda:1", "cpu"."""

    @property
    def key(self) -> str:
        """File-name-safe name, unique within a fingerprint: the digest tells functions apart, too."""
        function = _UNSAFE.sub("_", self.spec.function[:FUNCTION_LETTERS])
        device = self.device.replace(":", "")
        return f"{device}-{function}-{self.spec.phase}-{self.spec.digest}"

    def __str__(self) -> str:
        return f"{self.spec} on {self.device}"


class ShapePlan(_Value):
    """Ordered, unique input specs, and the workload they belong to."""

    format: Literal[1] = PLAN_FORMAT
    workload: str | None = None
    """``module:attribute`` of the workload, as the command line names it."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the workload factory."""
    compile_options: dict[str, JsonValue] = Field(default_factory=dict)
    """More keyword arguments of ``torch.compile``: mode, fullgraph, backend, options."""
    engine: EngineName = "trace"
    """trace: torch traces every shape at every start, for any module. program: compiled ahead of time
    and loaded without tracing, for full graphs; what cannot be one goes by trace and is reported.
    auto: the same, without a word."""
    lengths: dict[str, JsonValue] = Field(default_factory=dict)
    """Where the buckets came from: source, count, step, padded share. For people; not read back."""
    specs: tuple[InputSpec, ...] = Field(min_length=1)

    @field_validator("specs")
    @classmethod
    def _unique(cls, specs: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
        return tuple(dict.fromkeys(specs))

    @field_validator("compile_options")
    @classmethod
    def _allowed(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        fixed = sorted({"dynamic", "recompile_limit", "disable"} & options.keys())
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot be chosen: the plan decides")
        return options

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan file (YAML or JSON). Raises PlanError naming file and field."""
        try:
            data = read_yaml(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"plan file '{path}' cannot be read: {error.strerror or error}",
                next_step="Write one with 'compilecache plan --output FILE'",
            ) from error
        except ValueError as error:
            raise PlanError(
                f"plan file '{path}' is not YAML: {str(error)[:1000]}",
                next_step="Mend the line it names, or write the plan anew",
            ) from error
        return cls.parse(data, source=str(path))

    @classmethod
    def parse(cls, data: object, *, source: str = "plan") -> Self:
        """Checks plain data against the plan format. Raises PlanError naming every bad field."""
        if not isinstance(data, Mapping):
            raise PlanError(f"{source} holds no mapping", next_step="Start it with 'format: 1'")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = [_explain(fault["loc"], fault["msg"]) for fault in error.errors()]
            raise PlanError(
                f"{source}: " + "; ".join(problems),
                next_step="Mend the fields named, or write the plan anew with 'compilecache plan'",
                field=".".join(map(str, error.errors()[0]["loc"])),
            ) from error

    def dump(self) -> str:
        """The plan as YAML, one spec a line."""
        data = self.model_dump(mode="json", exclude_defaults=True) | {"format": self.format}
        specs = data.pop("specs")
        head = {
            name: data[name]
            for name in ("format", "workload", "settings", "compile_options", "engine", "lengths")
            if name in data
        }
        lines = [yaml.safe_dump(head, sort_keys=False, width=100), "specs:\n"]
        for spec in specs:
            flow = yaml.safe_dump(spec, sort_keys=False, default_flow_style=True, width=10_000)
            lines.append(f"- {flow}")
        return "".join(lines)

    def targets(
        self, devices: Sequence[str], *, limit: int = TARGET_LIMIT
    ) -> tuple[CompileTarget, ...]:
        """Every spec on every device, device by device. Raises PlanError above ``limit``."""
        count = len(self.specs) * len(devices)
        if count > limit:
            raise PlanError(
                f"{len(self.specs)} specs times {len(devices)} devices make {count} targets, "
                f"above the limit of {limit}",
                next_step="Use fewer buckets ('compilecache plan --buckets K'), or raise --limit",
                field="specs",
            )
        return tuple(CompileTarget(spec, device) for device in devices for spec in self.specs)

    def sizes(self, dim: str = "seq_len") -> tuple[int, ...]:
        """The planned sizes of one dimension, ascending."""
        found = {value for spec in self.specs if isinstance(value := spec.dims.get(dim), int)}
        return tuple(sorted(found))

    def fit(self, length: int, dim: str = "seq_len") -> int:
        """The smallest planned size that holds ``length``. Raises PlanError when none does."""
        for size in self.sizes(dim):
            if 0 < length <= size:
                return size
        largest = max(self.sizes(dim), default=0)
        raise PlanError(
            f"a {dim} of {length} fits no planned shape (largest {largest})",
            next_step="Truncate the row, or plan a larger bucket with 'compilecache plan'",
            field=dim,
        )


def _explain(loc: tuple[int | str, ...], message: str) -> str:
    where = ".".join(map(str, loc))
    name = str(loc[-1])
    known = [*ShapePlan.model_fields, *InputSpec.model_fields, *TensorSpec.model_fields]
    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if "Extra inputs" in message and near else ""
    return f"field '{where}': {message}{hint}"


def plan_of(specs: Iterable[InputSpec], *, workload: str | None = None) -> ShapePlan:
    """A plan from specs in hand. Raises PlanError when there are none."""
    return ShapePlan.parse(
        {"workload": workload, "specs": [spec.model_dump() for spec in specs]}, source="plan"
    )
