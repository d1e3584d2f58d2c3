"""What a compile must know of a GPU that is not there: recorded where there is one, a small JSON file.

Importing this module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from compilecache.documents import read_json
from compilecache.errors import PlanError

PROFILE_FORMAT: Final = 1
SHIPPED = Path(__file__).parent / "gpus"
"""Profiles that come with the package."""

_Version = Annotated[str, Field(pattern=r"^\d+\.\d+[\w.+-]*$")]
_Major = Annotated[int, Field(ge=1, le=99, strict=True)]
_Minor = Annotated[int, Field(ge=0, le=9, strict=True)]


class Operation(BaseModel):
    """One call of an operation of torch."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^aten\.\w+\.\w+$", max_length=200)]
    """With its overload: "aten.slice.Tensor"."""
    arguments: Annotated[tuple[JsonValue, ...], Field(strict=False)]
    """In JSON; ``{"tensor": "query"}`` is one of the question, ``{"tensor": 0}`` what the first call gave,
    ``{"tensor": 0, "item": 1}`` the second of its results."""
    named: dict[str, JsonValue] = {}
    """The same, by name."""


class Answer(BaseModel):
    """What torch makes of one attention on the GPU."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    operations: Annotated[tuple[Operation, ...], Field(strict=False, min_length=1)]
    """Called one after the other."""
    output: JsonValue
    """Which of their tensors it is, as among their arguments."""


class GpuProfile(BaseModel):
    """One kind of GPU, and what code for it is compiled with."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = PROFILE_FORMAT
    vendor: Literal["nvidia"]
    name: Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$", max_length=200)]
    """As the driver says: "NVIDIA H200"."""
    capability: Annotated[tuple[_Major, _Minor], Field(strict=False)]
    """Compute capability, (9, 0)."""
    multi_processor_count: Annotated[int, Field(ge=1, le=4096)]
    max_threads_per_multi_processor: Annotated[int, Field(ge=32, le=65536)]
    max_threads_per_block: Annotated[int, Field(ge=32, le=65536)]
    regs_per_multiprocessor: Annotated[int, Field(ge=1024, le=2**24)]
    warp_size: Literal[32]
    shared_memory_per_block: Annotated[int, Field(ge=1024, le=2**30)]
    """Bytes, without asking for more."""
    shared_memory_per_block_optin: Annotated[int, Field(ge=1024, le=2**30)]
    """Bytes at most; a kernel that needs more cannot run."""
    shared_memory_per_multiprocessor: Annotated[int, Field(ge=1024, le=2**30)]
    L2_cache_size: Annotated[int, Field(ge=0, le=2**40)]
    """Bytes."""
    total_memory: PositiveInt
    """Bytes."""
    cuda: _Version
    """Of torch where it was recorded: "13.0"."""
    triton: _Version
    """The same: "3.6.0"."""
    attention: dict[str, Answer] = {}
    """Question → what torch calls there for ``scaled_dot_product_attention``; of plans it was asked about."""
    padding: dict[str, bool] = {}
    """torch's key of a matrix product → whether it is faster with padded sizes; of the same plans."""

    @field_validator(
        "max_threads_per_block", "shared_memory_per_block_optin", "shared_memory_per_multiprocessor"
    )
    @classmethod
    def _plausible(cls, value: int, info: ValidationInfo) -> int:
        """A block fits a multiprocessor, and asking for more gives no less."""
        least = {
            "shared_memory_per_block_optin": "shared_memory_per_block",
            "shared_memory_per_multiprocessor": "shared_memory_per_block_optin",
        }.get(str(info.field_name))
        if least is not None and value < info.data.get(least, 0):
            raise ValueError(f"less than {least}, {info.data[least]}")
        most = info.data.get("max_threads_per_multi_processor", value)
        if least is None and value > most:
            raise ValueError(f"more than max_threads_per_multi_processor, {most}")
        return value

    def properties(self) -> dict[str, str | int]:
        """As ``torch.cuda.get_device_properties`` names them."""
        facts = self.model_dump(exclude=_NO_PROPERTIES)
        return {**facts, "major": self.capability[0], "minor": self.capability[1]}

    def without_answers(self) -> Self:
        """What it says of the GPU alone, not of a workload."""
        return self.model_copy(update={"attention": {}, "padding": {}})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a profile, or one that is shipped, by its name. Raises PlanError naming the field."""
        shipped = SHIPPED / f"{path}.json"
        source = shipped if shipped.is_file() else Path(path)
        try:
            data = read_json(source.read_bytes())
        except OSError as error:
            names = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.json")))
            raise PlanError(
                f"GPU profile '{path}' cannot be read: {error.strerror or error}",
                next_step=f"Record one with 'compilecache gpu-profile', or name one of: {names}",
                field="gpu_profile",
            ) from error
        except ValueError as error:
            raise PlanError(
                f"GPU profile '{path}' is not JSON: {str(error)[:200]}",
                next_step="Record it anew with 'compilecache gpu-profile --output FILE'",
                field="gpu_profile",
            ) from error
        return cls.parse(data, source=f"GPU profile '{path}'")

    @classmethod
    def parse(cls, data: object, *, source: str = "GPU profile") -> Self:
        """Checks plain data. Raises PlanError naming every bad field."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            faults = error.errors()
            problems = [f"field '{'.'.join(map(str, f['loc']))}': {f['msg']}" for f in faults]
            raise PlanError(
                f"{source}: {'; '.join(problems)}",
                next_step="Record it anew with 'compilecache gpu-profile --output FILE'",
                field=".".join(map(str, faults[0]["loc"])),
            ) from error

    def dump(self) -> str:
        """JSON, a field a line; without answers where there are none."""
        empty = {name for name in ("attention", "padding") if not getattr(self, name)}
        return self.model_dump_json(indent=2, exclude=empty) + "\n"


_NO_PROPERTIES = {"format", "vendor", "capability", "cuda", "triton", "attention", "padding"}
"""Fields that torch's properties of a device do not have under that name."""


def record(device: str = "cuda:0") -> GpuProfile:
    """The profile of a GPU of this machine. Raises PlanError when it is none, or of another vendor."""
    import torch

    from compilecache.replicas import refuse_absent

    where = (
        "Record a profile where one is, with a CUDA build of torch; that of the H200 comes along"
    )
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise PlanError(f"'{device}': there is no NVIDIA GPU here", next_step=where, field="device")
    refuse_absent(device)
    if torch.device(device).type != "cuda":
        raise PlanError(f"'{device}' is no NVIDIA GPU", next_step=where, field="device")
    found = torch.cuda.get_device_properties(device)
    names = {*GpuProfile.model_fields} - _NO_PROPERTIES
    return GpuProfile.parse(
        {
            **{name: getattr(found, name) for name in names},
            "vendor": "nvidia",
            "capability": (found.major, found.minor),
            **versions(),
        },
        source=f"what torch says of {device}",
    )


def versions() -> dict[str, str]:
    """CUDA and Triton of this environment, as a profile names them."""
    import importlib

    import torch

    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        triton = "none"
    return {"cuda": str(torch.version.cuda or "none"), "triton": triton}


def refuse_other_versions(profile: GpuProfile) -> None:
    """Raises PlanError for a torch without CUDA, or one whose CUDA or Triton is not the profile's."""
    for field, here in versions().items():
        if here == "none":
            raise PlanError(
                f"this torch has no {'CUDA' if field == 'cuda' else 'Triton'}",
                next_step="Install the CUDA build of torch that the trainer uses; it needs no GPU",
                field=field,
            )
        if (said := getattr(profile, field)) != here:
            raise PlanError(
                f"GPU profile of '{profile.name}': field '{field}' is {said}, here it is {here}",
                next_step="Use the profile's versions, or record one where the trainer runs",
                field=field,
            )
