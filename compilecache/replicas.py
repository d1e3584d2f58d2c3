"""Models built for warming: one per device, with random parameters, when there is no trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import JsonValue

from compilecache.engines.trace import Replica
from compilecache.errors import PlanError
from compilecache.fingerprint import Fingerprint, fingerprint
from compilecache.workload import Workload


def build_replicas(workload: Workload, devices: Sequence[str]) -> Iterator[Replica]:
    """Models with random parameters, one device after the other."""
    for device in devices:
        refuse_absent(device)
        yield Replica(device, workload.build(torch.device(device)))


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


def fingerprint_for(
    workload: Workload, device: str, options: Mapping[str, JsonValue] | None = None
) -> Fingerprint:
    """The fingerprint of the workload on devices of this one's kind; builds the model for it."""
    replica = next(build_replicas(workload, [device]))
    return fingerprint(workload, replica.module, torch.device(device), options=options)
