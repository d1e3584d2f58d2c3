"""The one function of torch's C++ that is replaced so that gradients can be traced for a GPU that is not there.

Part of ``absent_gpu``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import torch

from compilecache.torch_names import absent

_PLACES = {"torch._C": ["_ensureCUDADeviceGuardSet"]}
_HOOKS_HEADER = Path("ATen", "detail", "AcceleratorHooksInterface.h")
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
"""``at::detail::getCUDAHooks()``."""
_CONTEXT = "hasPrimaryContext"


def missing() -> list[str]:
    """What is used here and this torch does not have."""
    found = absent(_PLACES)
    if not hasattr(_library("libtorch_cpu.so"), _HOOKS):
        found.append("at::detail::getCUDAHooks")
    if _slot() is None:
        found.append(f"at::AcceleratorHooksInterface::{_CONTEXT}")
    return found


def install() -> None:
    """Autograd asks whether the device of a gradient has a context: it has none, and that is fine.

    Asked for a device that is not there, torch's own answer is an error. The question goes through the
    table of virtual functions of one object; its place in it is counted in the header that torch ships.
    """
    torch._C._ensureCUDADeviceGuardSet()
    slot = _slot()
    assert slot is not None
    get_hooks = getattr(_library("libtorch_cpu.so"), _HOOKS)
    get_hooks.restype = ctypes.c_void_p
    table = ctypes.POINTER(ctypes.c_void_p).from_address(get_hooks())
    before, size = 2, 128  # what lies before the first function: offset and type
    start = ctypes.addressof(table.contents) - before * ctypes.sizeof(ctypes.c_void_p)
    copied = (ctypes.c_void_p * (before + size))()
    ctypes.memmove(copied, start, ctypes.sizeof(copied))
    copied[before + slot] = ctypes.cast(_no_context, ctypes.c_void_p).value
    _KEPT.append(copied)
    place = ctypes.c_void_p.from_address(get_hooks())
    # C++ destroys the object after Python has freed what is its own.
    atexit.register(setattr, place, "value", place.value)
    place.value = ctypes.addressof(copied) + before * ctypes.sizeof(ctypes.c_void_p)


_KEPT: list[Any] = []
"""What C++ holds on to."""


_no_context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(
    lambda hooks, device: True
)


@functools.cache
def _slot() -> int | None:
    """Place of the question among the virtual functions; a destructor takes two."""
    header = Path(torch.__file__).parent / "include" / _HOOKS_HEADER
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    names: list[str] = re.findall(r"^\s*virtual\s[^;{]*?(~?\w+)\(", text, re.MULTILINE)
    if _CONTEXT not in names:
        return None
    before = names[: names.index(_CONTEXT)]
    return len(before) + sum(name.startswith("~") for name in before)


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
