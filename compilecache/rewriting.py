"""Generated code that names one device index, rewritten to name another. Text only.

What generated code looks like is torch's own business: a line that still names the old index is told, and
its program not used.
"""

from __future__ import annotations

import ast
import re

NAMING = (
    r"\bcuda:",
    r"\b_DeviceGuard\(",
    r"\bget_raw_stream\(",
    r"\bset_device\(",
    r"\bDeviceProperties\(type='cuda', index=",
    r"\btorch\.cuda\.device\(",
    r"\bstream_?guard\(",
    r"\bdevice\(type='cuda', index=",
    r"\bdevice\('cuda', ",
)
"""What generated code writes before a device index."""

_LEFT = (
    r"\bcuda:{old}\b|\b(?:\w*[dD]evice\w*|\w*[sS]tream\w*)\(\s*{old}\s*[,)]"
    r"|\bdevice(?:_idx|_index|_id)?\s*=\s*{old}\b|\bcuda'?\s*,\s*(?:index\s*=\s*)?{old}\b"
)
"""What would still name it."""


def rewritten(source: str, old: int, new: int) -> tuple[str, int, tuple[str, ...]]:
    """Generated code for another device index, how many names were changed, what is left over."""
    moved, count = re.subn(rf"({'|'.join(NAMING)}){old}\b", rf"\g<1>{new}", source)
    named = re.compile(_LEFT.format(old=old))
    if named.search(moved) is None:
        return moved, count, ()
    lines = (line.strip()[:160] for line in moved.splitlines() if named.search(line))
    return moved, count, tuple(lines)


_KERNEL = re.compile(r"async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL)


def kernel_sources(source: str) -> list[str]:
    """The second argument of every ``async_compile.triton(name, source, …)``."""
    texts: list[str] = _KERNEL.findall(source)
    return [str(ast.literal_eval(f"'''{text}'''")) if "\\" in text else text for text in texts]
