"""Installed packages that the environment which published did not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata

from compilecache.doctor.finding import Finding
from compilecache.packages import KNOWN

WHY = "The cache that was published may not fit what is traced here."


def check_packages(here: Mapping[str, str], there: Mapping[str, str] | None) -> Iterator[Finding]:
    """``here``: of this environment. ``there``: of the published one, None when that is not known."""
    if there is None:
        yield from map(_unknown, here.items())
    else:
        yield from (_added(name, here[name]) for name in here if name not in there)
        yield from (_gone(name, there[name]) for name in there if name not in here)
        yield from (
            _other(name, there[name], here[name])
            for name in here
            if name in there and there[name] != here[name]
        )
    if not here:
        yield Finding("no package that is known to replace or patch torch or Triton is installed")
    elif there == here:
        yield Finding("packages that patch torch are those of the published environment")


def check_doubles(providers: Mapping[str, list[str]] | None = None) -> Iterator[Finding]:
    """Two distributions that write the same folder: the one installed last has won."""
    known = metadata.packages_distributions() if providers is None else providers
    for folder in ("torch", "triton"):
        names = sorted(set(known.get(folder, ())))
        if len(names) > 1:
            yield Finding(
                f"{' and '.join(names)} all bring the package '{folder}'",
                "The files of one lie over those of the other: the version that is shown may not be "
                "the code that runs.",
                f"pip show --files {' '.join(names)}  # keep one, uninstall the others, install it anew",
                "warning",
            )


def _unknown(package: tuple[str, str]) -> Finding:
    name, version = package
    return Finding(
        f"{name} {version} is installed, which {KNOWN[name]}",
        "Whether the environment that published had it is not known: with PLAN and a store it is.",
        f"pip show {name}",
        "note",
    )


def _added(name: str, version: str) -> Finding:
    return Finding(
        f"{name} {version} is installed, the published environment did not have it",
        f"It {KNOWN.get(name, 'may patch torch')}. {WHY}",
        f"pip uninstall --yes {name}",
        "warning",
    )


def _gone(name: str, version: str) -> Finding:
    return Finding(
        f"{name} is not installed, the published environment had {version}",
        f"It {KNOWN.get(name, 'may patch torch')}. {WHY}",
        f"pip install {name}=={version}",
        "note",
    )


def _other(name: str, then: str, now: str) -> Finding:
    return Finding(
        f"{name} is {now}, the published environment had {then}",
        f"It {KNOWN.get(name, 'may patch torch')}. {WHY}",
        f"pip install {name}=={then}",
        "note",
    )
