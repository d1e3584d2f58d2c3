"""Installed packages that replace, pin or patch torch, Triton or attention; none is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata

from compilecache.documents import read_json
from compilecache.fingerprint import Fingerprint

PINS = "is built for one version of torch: installing it may swap torch or Triton"
PATCHES = "patches torch or models when it is imported, so other graphs are traced"
COMPILES = "brings a compiler of its own, and may replace or shadow Triton"

KNOWN = {
    "apex": PATCHES,
    "deepspeed": PATCHES,
    "flash-attn": PINS,
    "flashinfer-python": PINS,
    "intel-extension-for-pytorch": PATCHES,
    "liger-kernel": PATCHES,
    "pytorch-triton": COMPILES,
    "pytorch-triton-rocm": COMPILES,
    "sageattention": PINS,
    "sglang": PINS,
    "tilelang": COMPILES,
    "torch-tensorrt": PINS,
    "transformer-engine": PINS,
    "triton-nightly": COMPILES,
    "unsloth": PATCHES,
    "vllm": PINS,
    "xformers": PINS,
}
"""Name as the package index spells it → what it does."""


def interfering() -> dict[str, str]:
    """Those that are installed here, with their versions."""
    found = {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name in KNOWN:
            found[name] = one.version
    return dict(sorted(found.items()))


def described(mark: Fingerprint) -> str:
    """What a store keeps of a fingerprint: its components, and these packages beside them.

    The digest is over the components alone: a package that changes no graph costs no artifact.
    """
    return json.dumps({**json.loads(mark.dump()), "packages": interfering()}, indent=1)


def packages_of(text: str) -> Mapping[str, str] | None:
    """The packages that ``described`` wrote; None when the text has none."""
    try:
        found = read_json(text)
        packages = found["packages"] if isinstance(found, dict) else {}
        return {str(name): str(version) for name, version in packages.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
