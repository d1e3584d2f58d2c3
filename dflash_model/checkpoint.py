"""Published checkpoints: a folder with ``config.json`` and ``*.safetensors``, whole or in shards.

A drafter's checkpoint does not hold ``embed_tokens`` and ``lm_head``: they are its target's.
Needs the extra ``train`` (safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from compilecache.errors import CompileCacheError
from compilecache.files import replacing
from dflash_model.batch import Attend
from dflash_model.hf_config import from_hf, to_hf
from dflash_model.model import DEFAULT_ANCHORS, Drafter

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TARGET_NAMES = {
    "embed_tokens.weight": (
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
    ),
    "lm_head.weight": ("lm_head.weight", "model.lm_head.weight"),
}


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class _Reader(Protocol):
    """What is used of an open safetensors file, whose own types say less."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class CheckpointError(CompileCacheError, ValueError):
    """A checkpoint that does not fit; ``faults`` lists every name that is at fault."""

    def __init__(self, problem: str, *, next_step: str, faults: tuple[str, ...] = ()) -> None:
        self.faults = faults
        super().__init__(problem, next_step=next_step)


def load_drafter(
    folder: str | Path,
    *,
    target: str | Path | None = None,
    device: torch.device | None = None,
    anchors: int = DEFAULT_ANCHORS,
    attention: Attend = "auto",
    packed: bool = False,
) -> Drafter:
    """The drafter of a folder, in the dtype of its config, its head from the folder ``target``.

    Without a target ``embed_tokens`` and ``lm_head`` are random. Raises CheckpointError with
    every missing, unexpected or mis-shaped name, PlanError for a bad ``config.json``.
    """
    drafter = Drafter.random(
        from_hf(folder),
        torch.device("cpu") if device is None else device,
        anchors=anchors,
        attention=attention,
        packed=packed,
    )
    files = _TensorFiles(Path(folder))
    wanted = {name: p for name, p in drafter.named_parameters() if name not in _TARGET_NAMES}
    files.check({name: tuple(p.shape) for name, p in wanted.items()}, exact=True)
    with torch.no_grad():
        for name, tensor in files.read(wanted):
            wanted[name].copy_(tensor)
    if target is not None:
        load_target(drafter, target)
    return drafter


def load_target(drafter: Drafter, folder: str | Path) -> None:
    """Fills ``embed_tokens`` and ``lm_head`` from the target's checkpoint; tied ones share a tensor.

    Reads only the shards that hold them. Raises CheckpointError naming what does not fit.
    """
    files = _TensorFiles(Path(folder))
    embedding = files.first(_TARGET_NAMES["embed_tokens.weight"])
    head = files.first((*_TARGET_NAMES["lm_head.weight"], embedding))
    shape = tuple(drafter.embed_tokens.weight.shape)
    files.check({embedding: shape, head: shape}, exact=False)
    with torch.no_grad():
        for name, tensor in files.read({embedding, head}):
            if name == embedding:
                drafter.embed_tokens.weight.copy_(tensor)
            if name == head:
                drafter.lm_head.weight.copy_(tensor)


def save_drafter(drafter: Drafter, folder: str | Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` under the published names.

    Left out: ``embed_tokens`` and ``lm_head``, which are the target's.
    """
    from safetensors.torch import save

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in drafter.named_parameters()
        if name not in _TARGET_NAMES
    }
    config = json.dumps(to_hf(drafter.config), indent=2) + "\n"
    with replacing(place / _SINGLE) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    with replacing(place / "config.json") as file:
        file.write(config.encode())


class _TensorFiles:
    """The tensors of a folder's safetensors files: which there are, their shapes, their content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = self._index() if (folder / _INDEX).is_file() else self._scan()

    def first(self, names: Iterable[str]) -> str:
        """The first of these names that is there."""
        wanted = tuple(names)
        for name in wanted:
            if name in self._files:
                return name
        raise self._mismatch((f"missing {' or '.join(wanted)}",))

    def check(self, shapes: dict[str, tuple[int, ...]], *, exact: bool) -> None:
        """Raises CheckpointError unless every name is there in its shape; exact: and no other."""
        extra = sorted(set(self._files) - set(shapes) - set(_TARGET_NAMES)) if exact else []
        faults = [f"missing {name}" for name in shapes if name not in self._files]
        faults += [f"unexpected {name}" for name in extra]
        present = {name for name in shapes if name in self._files}
        faults += [
            f"{name} is {list(found)}, expected {list(shapes[name])}"
            for name, found in self._shapes(present)
            if found != shapes[name]
        ]
        if faults:
            raise self._mismatch(tuple(faults))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names, on the CPU, one at a time."""
        for file, held in self._by_file(names):
            with self._opened(file) as tensors:
                for name in held:
                    yield name, tensors.get_tensor(name)

    def _shapes(self, names: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file, held in self._by_file(names):
            with self._opened(file) as tensors:
                for name in held:
                    yield name, tuple(tensors.get_slice(name).get_shape())

    def _by_file(self, names: Iterable[str]) -> Iterator[tuple[Path, list[str]]]:
        wanted = sorted(names)
        for file in sorted({self._files[name] for name in wanted}):
            yield file, [name for name in wanted if self._files[name] == file]

    def _index(self) -> dict[str, Path]:
        try:
            weight_map = json.loads((self._folder / _INDEX).read_text("utf-8"))["weight_map"]
            files = {name: self._folder / Path(file).name for name, file in weight_map.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._mismatch((f"{_INDEX} holds no weight_map",)) from error
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise self._mismatch(tuple(f"missing shard {name}" for name in absent))
        return files

    def _scan(self) -> dict[str, Path]:
        files: dict[str, Path] = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            with self._opened(file) as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        if not files:
            raise self._mismatch(("no *.safetensors file",))
        return files

    @contextmanager
    def _opened(self, file: Path) -> Iterator[_Reader]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as tensors:
                yield cast(_Reader, tensors)
        except SafetensorError as error:
            raise self._mismatch((f"{file.name} is damaged: {error}",)) from error

    def _mismatch(self, faults: tuple[str, ...]) -> CheckpointError:
        return CheckpointError(
            f"checkpoint '{self._folder}': " + "; ".join(faults),
            next_step="Point at the folder of a checkpoint whose config.json matches its tensors",
            faults=faults,
        )
