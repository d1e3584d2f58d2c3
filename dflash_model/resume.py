"""Checkpoints of a training run: ``DIR/step-000100``, whole or not there at all.

``drafter/`` is a published checkpoint that ``load_drafter`` reads; ``training.safetensors`` is the
state of the optimizer; ``training.json`` says which step it was, and of which run. Anchors and the
order of the data follow from the seed and the step, so nothing else is needed to go on.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from compilecache.files import TEMP_PREFIX, replacing, sync_directory
from dflash_model.checkpoint import CheckpointError, save_drafter
from dflash_model.hf_config import from_hf
from dflash_model.model import Drafter
from dflash_model.optimizer import Optimizer

FORMAT = 1
_STATE = "training.json"
_TENSORS = "training.safetensors"
_WEIGHTS = "drafter/model.safetensors"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What must stay the same for a resumed run to have the losses of one that never stopped."""

    seed: int
    """Of weights, data order and anchors."""
    drafters: int
    """Replicas, each with a micro-batch a step."""
    batch_size: int
    """Rows of a micro-batch."""
    anchors: int
    """Blocks of a row."""
    seq_lens: tuple[int, ...]
    """Planned lengths."""
    data: str
    """Digest of the rows."""
    steps: int
    """Of the whole run: the learning rate depends on it."""
    lr: float
    """Peak learning rate."""
    warmup_ratio: float
    """Share of the steps in which it rises."""
    clip: float
    """Largest norm of the gradient."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    """``…/step-000100``."""
    step: int
    """Steps that were done."""
    run: Mapping[str, object]
    """The identity of the run that wrote it."""


def find_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a folder, or the newest of those in it. Raises CheckpointError."""
    if (folder / _STATE).is_file():
        return _read(folder)
    found = _steps_in(folder)
    if not found:
        raise CheckpointError(
            f"'{folder}' holds no checkpoint of a run",
            next_step="Name the folder that was passed as --save, or one of its step-… folders",
        )
    return _read(found[max(found)])


def check_free(folder: Path, first_step: int) -> None:
    """Raises CheckpointError when a folder already holds a checkpoint later than ``first_step``."""
    later = [step for step in _steps_in(folder) if step > first_step]
    if later:
        raise CheckpointError(
            f"'{folder}' already holds step {max(later)}",
            next_step="Go on from it with --resume, or name another folder as --save",
        )


def save_checkpoint(
    folder: Path, step: int, drafter: Drafter, optimizer: Optimizer, run: RunIdentity
) -> Path:
    """Writes ``folder/step-…`` all at once and gives its path; one that is there stays. Raises OSError."""
    place = folder / f"step-{step:06}"
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(dir=folder, prefix=TEMP_PREFIX))
    try:
        save_drafter(drafter, temp / "drafter")
        _write_state(temp, step, optimizer, run)
        temp.rename(place)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    sync_directory(folder)
    return place


def load_checkpoint(
    checkpoint: Checkpoint,
    drafters: list[Drafter],
    optimizers: list[Optimizer],
    run: RunIdentity,
) -> None:
    """Puts every replica and optimizer where the run was.

    Raises CheckpointError for the checkpoint of another run, naming what differs, and for one that
    is damaged or of another drafter.
    """
    _check_run(checkpoint, run)
    _check_config(checkpoint, drafters[0])
    shapes = {name: tuple(p.shape) for name, p in optimizers[0].trained.items()}
    weights = _tensors(checkpoint.folder / _WEIGHTS, shapes)
    state = _tensors(checkpoint.folder / _TENSORS, optimizers[0].shapes())
    for optimizer in optimizers:
        with torch.no_grad():
            for name, parameter in optimizer.trained.items():
                parameter.copy_(weights[name])
        optimizer.restore(state, checkpoint.step)


def _write_state(folder: Path, step: int, optimizer: Optimizer, run: RunIdentity) -> None:
    from safetensors.torch import save_file

    # Not through ``replacing``: the folder appears as a whole, and gigabytes need no second copy.
    tensors = {name: tensor.cpu().contiguous() for name, tensor in optimizer.state().items()}
    save_file(tensors, folder / _TENSORS)
    with (folder / _TENSORS).open("rb") as written:
        os.fsync(written.fileno())
    text = json.dumps({"format": FORMAT, "step": step, "run": asdict(run)}, indent=2)
    with replacing(folder / _STATE) as file:
        file.write(f"{text}\n".encode())


def _steps_in(folder: Path) -> dict[int, Path]:
    return {
        int(path.parent.name.removeprefix("step-")): path.parent
        for path in folder.glob(f"step-*/{_STATE}")
        if path.parent.name.removeprefix("step-").isdigit()
    }


def _read(folder: Path) -> Checkpoint:
    try:
        data = json.loads((folder / _STATE).read_text("utf-8"))
        if data["format"] != FORMAT:
            raise _fault(folder, f"{_STATE} has format {data['format']}, not {FORMAT}")
        return Checkpoint(folder, int(data["step"]), dict(data["run"]))
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise _fault(folder, f"{_STATE} is damaged") from error


def _check_run(checkpoint: Checkpoint, run: RunIdentity) -> None:
    ours: dict[str, object] = json.loads(json.dumps(asdict(run)))
    faults = tuple(
        f"{name} was {checkpoint.run.get(name)}, is {value}"
        for name, value in ours.items()
        if checkpoint.run.get(name) != value
    )
    if faults:
        raise CheckpointError(
            f"checkpoint '{checkpoint.folder}' is of another run: {'; '.join(faults)}",
            next_step="Resume with the options and the data that it was started with",
            faults=faults,
        )


def _check_config(checkpoint: Checkpoint, drafter: Drafter) -> None:
    if from_hf(checkpoint.folder / "drafter") != drafter.config:
        raise _fault(checkpoint.folder, "its config.json is that of another drafter")


def _tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file. Raises CheckpointError with every name that does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise _fault(file.parent, f"{file.name} is damaged or missing") from error
    faults = [f"missing {name}" for name in shapes if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in shapes]
    faults += [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise _fault(file.parent, f"{file.name}: {'; '.join(faults)}", tuple(faults))
    return tensors


def _fault(folder: Path, problem: str, faults: tuple[str, ...] = ()) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{folder}': {problem}",
        next_step="Resume from an earlier step-… folder",
        faults=faults,
    )
