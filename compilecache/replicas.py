"""Models built for warming: one per device, with random parameters, when there is no trainer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from compilecache.engines.harness import Replica
from compilecache.errors import CompileCacheError, PlanError
from compilecache.fingerprint import Fingerprint, fingerprint
from compilecache.shapes import ShapePlan
from compilecache.workload import Workload, workload_of_plan


def build_replicas(workload: Workload, devices: Sequence[str]) -> Iterator[Replica]:
    """Models with random parameters, one device after the other."""
    for device in devices:
        refuse_absent(device)
        yield Replica(device, workload.build(torch.device(device)))


def build_fakes(workload: Workload, devices: Sequence[str]) -> Iterator[Replica]:
    """Models without data, for devices that are not there. Raises PlanError naming the line at fault."""
    from compilecache import absent_gpu, undecided

    for device in devices:
        try:
            with absent_gpu.faking():
                module = workload.build(torch.device(device))
        except CompileCacheError:
            raise
        except Exception as error:
            raise PlanError(
                f"the model cannot be built without its GPU: {undecided.words_of(error)}",
                next_step="Compile it where the GPU is, or change what is named",
                field="workload",
            ) from error
        yield Replica(device, module)


def refuse_absent(device: str) -> None:
    """Raises PlanError for a device that this machine does not have."""
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    known = kind in ("cpu", "cuda") and (index.isdigit() or (kind == "cpu" and not index))
    if not known or (kind == "cuda" and int(index) >= count):
        have = ", ".join([*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"])
        raise PlanError(
            f"there is no device '{device}' here",
            next_step=f"Choose among {have} with --device",
            field="device",
        )


def refuse_mixed(devices: Collection[str]) -> None:
    """Raises PlanError: one fingerprint cannot stand for two kinds of device."""
    kinds = {device: _kind(torch.device(device)) for device in sorted(devices)}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{device} ({kind})" for device, kind in kinds.items())
        raise PlanError(
            f"these devices are not of one kind: {named}",
            next_step="Warm each kind in a call of its own",
            field="device",
        )


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def fingerprint_for(plan: ShapePlan, device: str) -> Fingerprint:
    """The fingerprint of a plan's workload on devices of this kind; builds the model for it."""
    workload = workload_of_plan(plan)
    replica = next(build_replicas(workload, [device]))
    return fingerprint(
        workload,
        replica.module,
        torch.device(device),
        options=plan.compile_options,
        engine=plan.engine,
    )
