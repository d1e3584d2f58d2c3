"""Environment variables and settings of torch that keep the cache from working, or hide that it does not."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.doctor.finding import Finding, Level
from compilecache.fingerprint import ENV_IGNORED, ENV_PREFIXES
from compilecache.rootfolder import OWN

OFF = ("0", "false", "no", "off", "")


def _is_one(value: str) -> bool:
    return value == "1"


def _is_on(value: str) -> bool:
    return value.lower() not in OFF


def _is_off(value: str) -> bool:
    return value.lower() in OFF[:-1]


def _is_given(value: str) -> bool:
    return bool(value)


UNCACHED = "torch keeps nothing, so every start compiles and there is nothing to restore."
EAGER = "Nothing is compiled at all: correct, slow, and attention may take far more memory."

VARIABLES: dict[str, tuple[Callable[[str], bool], Level, str]] = {
    "TORCHDYNAMO_DISABLE": (_is_one, "error", EAGER),
    "TORCH_COMPILE_DISABLE": (_is_one, "error", EAGER),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (
        _is_given,
        "warning",
        "A function that cannot be compiled runs uncompiled, in silence. Any value turns it on, 0 too.",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (_is_on, "error", UNCACHED),
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": (_is_on, "error", UNCACHED),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": (_is_off, "error", UNCACHED),
    "TORCHINDUCTOR_AUTOGRAD_CACHE": (_is_off, "error", UNCACHED),
    "TORCHINDUCTOR_FREEZING": (
        _is_on,
        "warning",
        "Graphs with frozen parameters are never cached.",
    ),
    "TRITON_ALWAYS_COMPILE": (_is_on, "error", "Triton compiles every kernel on every start."),
    "TRITON_INTERPRET": (_is_on, "error", "Kernels are interpreted in Python, many times slower."),
    "TORCH_COMPILE_DEBUG": (_is_on, "note", "Every compile writes its traces to a folder: slow."),
}
"""Name → when it does harm, how much, and why."""


def check_variables(cache: CacheDir, given: Mapping[str, str]) -> Iterator[Finding]:
    """What is set in an environment."""
    found = [*_harmful(given), *_places(cache, given), *_keyed(given)]
    yield from found
    if not found:
        yield Finding("no variable of torch or Triton is set that matters")


def _harmful(given: Mapping[str, str]) -> Iterator[Finding]:
    for name, (harms, level, why) in VARIABLES.items():
        if name in given and harms(given[name]):
            yield Finding(f"{name}={given[name]} is set", why, f"unset {name}", level)


def _places(cache: CacheDir, given: Mapping[str, str]) -> Iterator[Finding]:
    triton = given.get("TRITON_CACHE_DIR")
    if triton and not _is_ours(Path(triton), cache):
        yield Finding(
            f"TRITON_CACHE_DIR={triton} is set, outside of the cache root",
            "Triton's files then lie where no record sees them: what is published lacks them, unless "
            "--extra-root triton takes them along.",
            "unset TRITON_CACHE_DIR",
            "warning",
        )
    inductor = given.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor and Path(inductor).absolute() != cache.root:
        yield Finding(
            f"TORCHINDUCTOR_CACHE_DIR={inductor} is set, the cache root is '{cache.root}'",
            "A process that compiles without compilecache uses that folder and finds nothing there.",
            f"export TORCHINDUCTOR_CACHE_DIR={shlex.quote(str(cache.root))}",
            "warning",
        )


def _is_ours(triton: Path, cache: CacheDir) -> bool:
    """Below this root, or below another that some earlier run has set and that is replaced."""
    mine = triton.absolute().is_relative_to(cache.root)
    return mine or any((folder / OWN).is_dir() for folder in list(triton.parents)[:2])


def _keyed(given: Mapping[str, str]) -> Iterator[Finding]:
    names = sorted(
        name
        for name in given
        if name.startswith(ENV_PREFIXES) and name not in ENV_IGNORED and name not in VARIABLES
    )
    if names:
        shown = " ".join(f"{name}={shlex.quote(given[name])}" for name in names)
        yield Finding(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set and part of the fingerprint",
            "Artifacts made without, or with another value, are not found. "
            "Set it alike where artifacts are made and where they are used.",
            f"export {shown}  # there too; or here: unset {' '.join(names)}",
            "note",
        )


# -- settings of torch ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of torch that hides damage, or does it."""

    module: str
    name: str
    harmful: bool
    """The value that does it."""
    why: str
    variables: tuple[str, ...] = ()
    """Environment variables that set it too, and are found by themselves."""

    @property
    def assignment(self) -> re.Pattern[str]:
        """How it looks in source text."""
        value = "True" if self.harmful else "False"
        return re.compile(rf"\b{self.name}[\"']?\s*[=:]\s*{value}\b")


HIDES = (
    "It hides the FX tracing error: a call beside a thread that traces then runs uncompiled, "
    "slowly and with far more memory, instead of failing."
)
SETTINGS = (
    Setting("torch._dynamo.config", "force_compile_during_fx_trace", True, HIDES),
    Setting("torch._dynamo.config", "error_on_nested_fx_trace", False, HIDES),
    Setting(
        "torch._dynamo.config",
        "suppress_errors",
        True,
        "A function that cannot be compiled runs uncompiled, in silence.",
        ("TORCHDYNAMO_SUPPRESS_ERRORS",),
    ),
    Setting("torch._dynamo.config", "disable", True, EAGER, ("TORCH_COMPILE_DISABLE",)),
    Setting(
        "torch._inductor.config",
        "force_disable_caches",
        True,
        UNCACHED,
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES"),
    ),
    Setting(
        "torch._inductor.config",
        "fx_graph_cache",
        False,
        UNCACHED,
        ("TORCHINDUCTOR_FX_GRAPH_CACHE",),
    ),
    Setting(
        "torch._functorch.config",
        "enable_autograd_cache",
        False,
        UNCACHED,
        ("TORCHINDUCTOR_AUTOGRAD_CACHE",),
    ),
)
NEARBY_FILES = 2000
"""Sources that are read at most."""


def check_settings() -> Iterator[Finding]:
    """As they are in this process, once the workload of the plan is imported. Imports torch."""
    from compilecache import torch_names

    found = False
    for setting in SETTINGS:
        value = torch_names.setting(setting.module, setting.name)
        if value is not setting.harmful:
            continue
        found = True
        if not any(name in os.environ for name in setting.variables):
            yield Finding(
                f"{setting.module}.{setting.name} is {value}",
                setting.why,
                f"grep -rn --include='*.py' {setting.name} .",
                "warning",
            )
    if not found:
        yield Finding("no setting of torch hides that something is not compiled")


def check_sources(folder: Path) -> Iterator[Finding]:
    """Sources below a folder that make such a setting: the trainer's, which runs elsewhere."""
    for path in _sources(folder):
        for number, setting in _made(path):
            yield Finding(
                f"{path}:{number} sets {setting.name} to {setting.harmful}",
                setting.why,
                f"vi +{number} {shlex.quote(str(path))}",
                "warning",
            )


def _sources(folder: Path) -> Iterable[Path]:
    count = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name[0] not in "._"
            and not (Path(parent, name) / "pyvenv.cfg").exists()
            and name not in ("site-packages", "node_modules")
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > NEARBY_FILES:
                    return
                yield Path(parent, name)


def _made(path: Path) -> Iterator[tuple[int, Setting]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    named = [one for one in SETTINGS if one.module == "torch._dynamo.config" and one.name in text]
    if not named or "dynamo" not in text:
        return
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("#")[0]
        yield from (
            (number, one) for one in named if one.name != "disable" and one.assignment.search(code)
        )
