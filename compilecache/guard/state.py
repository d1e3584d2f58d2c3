"""What torch sees of a thread besides the arguments of a call."""

from __future__ import annotations

import importlib
import threading
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from compilecache import torch_names


def missing() -> list[str]:
    """Private names used here that this torch does not have; each as an import path."""
    return torch_names.absent({"torch._C._dynamo.guards": ["GlobalStateGuard"]})


class ThreadState:
    """What torch's guards see of a thread besides the arguments; taken where the process is primed."""

    def __init__(self) -> None:
        from torch._C._dynamo.guards import GlobalStateGuard

        with torch.enable_grad():
            self._guard = GlobalStateGuard()
        self._settings = _settings()
        self._stance = torch_names.stance()
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]

    def adopt(self) -> ExitStack:
        """torch's configuration as it was there, for this thread; nothing where all threads share it.

        Where they share it, it holds what calls in other threads have set for their duration.
        """
        stack = ExitStack()
        if not settings_are_per_thread():
            return stack
        here = _settings()
        for module, values in self._settings.items():
            changed = {k: v for k, v in values.items() if repr(here[module].get(k)) != repr(v)}
            if changed:
                stack.enter_context(_config(module).patch(changed))
        return stack

    def autocast(self) -> ExitStack:
        """The autocast that was on there: a thread turns it on round its forward by itself."""
        stack = ExitStack()
        for kind, dtype, cached in self._autocasts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        return stack

    def differences(self) -> list[str]:
        """What would make a compiled call miss in this thread as it is; empty when nothing would."""
        with torch.enable_grad():
            fits = self._guard.check()
            found = [] if fits else self._guard.reason().split()
        stance = torch_names.stance()
        return found if stance == self._stance else [*found, f"stance ({stance})"]


@cache
def settings_are_per_thread() -> bool:
    """Whether torch's configuration, changed in one thread, is another in a second; by trying."""
    config, seen = _config("torch._dynamo.config"), []
    with config.patch(verbose=not config.verbose):
        thread = threading.Thread(target=lambda: seen.append(bool(config.verbose)))
        thread.start()
        thread.join()
        return seen != [bool(config.verbose)]


def _config(module: str) -> Any:
    return importlib.import_module(module)


def _settings() -> dict[str, dict[str, Any]]:
    names = ("torch._dynamo.config", "torch._inductor.config")
    return {name: _config(name).get_config_copy() for name in names}
