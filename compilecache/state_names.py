"""Every private name of torch about the state of a thread and of a module, each behind a probe.

What torch's guards would look at, and what a program cannot see: modes, hooks, wrappers. ``missing()``
lists what this torch does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compilecache.torch_names import absent

_PLACES = {
    "torch._C._dynamo.guards": ["GlobalStateGuard"],
    "torch._C": ["_len_torch_function_stack", "_len_torch_dispatch_stack"],
    "torch.nn.modules.module": ["_global_forward_hooks", "_global_forward_pre_hooks"],
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


# -- the state of a thread --------------------------------------------------------------------


class State:
    """What torch's guards see of a thread: grad mode, autocast, default dtype, determinism, modes."""

    def __init__(self) -> None:
        from torch._C._dynamo.guards import GlobalStateGuard

        self._guard = GlobalStateGuard()
        self._modes = _modes()
        self.words = state_words()

    def same(self) -> bool:
        """Whether this thread's is the same now."""
        return bool(self._guard.check()) and _modes() == self._modes

    def differences(self) -> list[str]:
        """What differs, in words."""
        if self.same():
            return []
        now = state_words()
        changed = [f"{k} is {now[k]}, was {v}" for k, v in self.words.items() if now[k] != v]
        return changed or [f"torch's state differs ({self._guard.reason()})"]


def _modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def state_words() -> dict[str, str]:
    """The same for people, and for comparing with another process."""
    words = {
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "modes": str(_modes()),
    }
    for kind in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(kind)
        words[f"autocast {kind}"] = str(torch.get_autocast_dtype(kind)) if on else "off"
    return words


# -- modules --------------------------------------------------------------------------------


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dictionaries in which a module keeps its hooks."""
    return tuple(vars(module)[name] for name in HOOKS)


def global_hooks() -> tuple[dict[Any, Any], ...]:
    """Hooks that are registered for every module of the process."""
    from torch.nn.modules import module

    names = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    return tuple(getattr(module, name) for name in names)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is, or was made, a wrapper for distributed training."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
    return bool(names & wrappers)


_PLAIN = {
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
}


def is_plain(tensor: Tensor) -> bool:
    """Whether a parameter or buffer is an ordinary tensor, whatever torch calls its class."""
    return (type(tensor).__module__, type(tensor).__name__) in _PLAIN
