"""Which components of a fingerprint are known to matter: those that enter the keys of torch's own cache.

What differs in others may be harmless; artifacts are kept apart all the same, to be on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weight:
    """What a difference in one component means."""

    matters: bool
    """It is known to change torch's keys; else it is only caution."""
    because: str
    """A sentence."""


_VECTORS = "Inductor picks vector instructions by it, for CPU code only"
_SOURCE = "Only lines that are traced change a key"

_TABLE: dict[str, tuple[str, str]] = {
    "torch": ("all", "Its version and sources are in every key"),
    "torch.git": ("all", "Another commit has other sources, and they are in every key"),
    "triton": ("cuda", "Triton's sources are in every key on a GPU"),
    "cuda": ("cuda", "Its version is in every key on a GPU"),
    "gpu": ("cuda", "The name of the GPU is in every key; kernels are built for its capability"),
    "driver": (
        "",
        "No key holds it; a driver that is too old refuses newer kernels when they load",
    ),
    "python": ("", "No key holds it; programs hold byte code of their own version"),
    "device": ("all", "Code for another kind of device"),
    "cpu": ("cpu", _VECTORS),
    "cpu.flags": ("cpu", _VECTORS),
    "cpu.threads": ("all", "CPU code is generated for so many threads: see OMP_NUM_THREADS"),
    "cpu.includes": (
        "all",
        "CPU libraries are named by the command that builds them, folders included",
    ),
    "env.TORCHINDUCTOR_": ("all", "It sets part of Inductor's settings, which are in every key"),
    "env.": ("", "Keys hold what it changes, not the variable"),
    "inductor.": ("all", "Inductor's settings are in every key"),
    "default_dtype": ("all", "It decides the dtype of new tensors"),
    "deterministic": ("all", "It is in every key"),
    "float32_matmul_precision": ("all", "How float32 is multiplied is in every key"),
    "engine": ("all", "Programs and traced targets are kept apart"),
    "compile.options": ("all", "They set the backend, or Inductor's settings"),
    "workload.parameters": ("all", "Shapes, dtypes, strides and requires_grad are in every key"),
    "workload.modules": ("", "Only what changes a graph changes a key"),
    "workload.config": ("", "Only what changes a graph changes a key"),
    "workload.hooks": ("", "They decide whether a program is possible"),
    "workload.forwards": ("", "They decide whether a program is possible"),
    "workload.compiled": ("", "They decide whether a program is possible"),
    "workload": ("", "The name of the class alone changes nothing; what it builds may"),
    "source.": ("", _SOURCE),
}
"""Label, or with a dot or underscore at its end a prefix → the devices on which it matters, and why."""


def weight(component: str, device: str) -> Weight:
    """``device``: the kind that is compiled for, "cuda" or "cpu"."""
    for label, (where, because) in _TABLE.items():
        if component == label or (label.endswith((".", "_")) and component.startswith(label)):
            return Weight(where in ("all", device), because)
    return Weight(False, "Nothing is known of it")
