"""What has changed since a tag was made, and the commands that undo it. Looks only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from compilecache.errors import CompileCacheError
from compilecache.fingerprint import Fingerprint, here
from compilecache.shapes import ShapePlan
from compilecache.sources import source_file
from compilecache.surroundings import surroundings, work_tree
from compilecache.tags import SourceFile, Surroundings, Tag, plan_changes

Kind = Literal[
    "python", "package", "torch", "gpu", "machine", "variable", "setting", "source", "model", "plan"
]
ABSENT = "absent"

BUILD = ("torch", "torch.git", "cuda", "triton", "python")
"""Components of a fingerprint that follow from what is installed."""
GPU = ("gpu", "driver", "device")
INDICES = "https://download.pytorch.org/whl/"
"""Where builds of torch for one platform come from; their versions name it ("2.11.0+cu130")."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was."""

    kind: Kind
    what: str
    then: str
    """When the tag was made; "absent" when it was not there."""
    now: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}: {_brief(self.then)} → {_brief(self.now)}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since a tag was made."""

    tag: str
    """Its full name."""
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    """What undoes them, line by line for a shell; what no command undoes is a comment."""
    trouble: str | None = None
    """Why the model could not be compared; None when it was."""

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {"changed": bool(self.changes), **asdict(self)}


def changes_since(tag: Tag, plan: ShapePlan | None = None, store: str | None = None) -> Changes:
    """Compares a tag with this process, and its plan with ``plan`` where there is one.

    The tag's model is built where its plan names a workload, to compare the whole fingerprint.
    ``store``: its address, if the commands must name it.
    """
    mark, trouble = _mark(tag)
    now = surroundings(tag.mark)
    found = [
        *_of_surroundings(tag.surroundings, now),
        *_of_fingerprint(tag.mark, mark, whole=trouble is None),
    ]
    if plan is not None and tag.plan is not None:
        pairs = plan_changes(tag.plan, plan)
        found += [Change("plan", what, then, now) for what, (then, now) in pairs.items()]
    commands = Undoing(tag, store).commands(found)
    return Changes(tag.full_name, tuple(found), tuple(commands), trouble)


def _mark(tag: Tag) -> tuple[Fingerprint, str | None]:
    """The fingerprint of the tag's plan here; without a model what is known all the same, and why."""
    import torch

    from compilecache.replicas import fingerprint_for

    kind = tag.mark.components.get("device", "cpu")
    there = kind != "cuda" or torch.cuda.is_available()
    if tag.plan is None or tag.plan.workload is None:
        trouble = "the tag knows no plan with a workload"
    elif not there:
        trouble = "this machine has no GPU"
    else:
        try:
            return fingerprint_for(tag.plan, "cuda:0" if kind == "cuda" else "cpu"), None
        except CompileCacheError as error:
            trouble = error.problem
        except Exception as error:  # the model's own: whatever its sources do now
            trouble = f"{type(error).__name__}: {error}"
    return here(torch.device(kind if there else "cpu")), trouble


def _of_surroundings(then: Surroundings, now: Surroundings) -> Iterator[Change]:
    if then.python != now.python:
        yield Change("python", "python", then.python, now.python)
    yield from _pairs("package", _installed(then), _installed(now))
    yield from _pairs("variable", then.variables, now.variables)
    yield from _pairs("setting", then.settings, now.settings)
    if then.gpus != now.gpus:
        yield Change("gpu", "GPUs", _counted(then.gpus), _counted(now.gpus))
    mine = {source.module: source.digest for source in now.sources}
    yield from _pairs("source", {s.module: s.digest for s in then.sources}, mine)


def _installed(of: Surroundings) -> dict[str, str]:
    """Versions; with the address of what came from one, unless that is a folder of this machine."""
    named = dict(of.packages)
    for name, origin in of.origins.items():
        if name in named and not origin.startswith("file:"):
            named[name] = f"{named[name]} ({origin})"
    return named


def _pairs(kind: Kind, then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for name in sorted({*then, *now}):
        pair = then.get(name, ABSENT), now.get(name, ABSENT)
        if pair[0] != pair[1]:
            yield Change(kind, name, *pair)


def _counted(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} x {name}" for name in kinds) or "none"


def _of_fingerprint(then: Fingerprint, now: Fingerprint, *, whole: bool) -> Iterator[Change]:
    """What the surroundings do not say. Not ``whole``: the model's components are not known here."""
    elsewhere = then.components.get("device") != now.components.get("device")
    for name, (old, new) in now.diff(then).items():
        if elsewhere and old == ABSENT:  # what only the other kind of device has
            continue
        of_model = name.startswith(("workload", "compile.", "source.")) or name == "engine"
        if name.startswith("env.") or (of_model and not whole):
            continue
        if name.startswith("source."):  # as the surroundings say, file by file
            continue
        yield Change(_kind(name), name, old, new)


def _kind(component: str) -> Kind:
    if component in BUILD:
        return "torch"
    if component in GPU:
        return "gpu"
    if component.startswith(("workload", "compile.", "engine")):
        return "model"
    return "machine" if component.startswith("cpu") else "setting"


class Undoing:
    """The commands that bring back what a tag's process ran in."""

    def __init__(self, tag: Tag, store: str | None = None) -> None:
        self._tag = tag
        self._then = tag.surroundings
        self._store = [] if store is None else ["--store", store]

    def commands(self, found: Iterable[Change]) -> list[str]:
        """In the order in which to run them."""
        kinds: dict[Kind, list[Change]] = {}
        for change in found:
            kinds.setdefault(change.kind, []).append(change)
        lines = [
            *self._python(kinds.get("python", ())),
            *self._packages(kinds.get("package", ()), built="torch" in kinds),
            *self._variables(kinds.get("variable", ())),
            *self._sources(kinds.get("source", ())),
            *self._by_hand([*kinds.get("setting", ()), *kinds.get("model", ())]),
            *self._machine([*kinds.get("gpu", ()), *kinds.get("machine", ())]),
        ]
        if kinds.get("plan"):
            lines.append(f"{self._show('plan')} > plan.yaml")
        # A comment ends with its line, whatever a tag says.
        lines = [" ".join(line.split()) if line.startswith("#") else line for line in lines]
        return [*lines, self._ours("restore", "--tag", self._tag.full_name)]

    def _ours(self, *words: str) -> str:
        return shlex.join(["compilecache", *words, *self._store])

    def _show(self, what: str) -> str:
        return self._ours("tag", self._tag.full_name, "--show", what)

    def _python(self, found: Sequence[Change]) -> Iterator[str]:
        for change in found:
            minor = ".".join(change.then.split(".")[:2])
            yield (
                f"# Python {change.then} is needed: python{minor} -m venv .venv, and install there "
                "what comes next"
            )

    def _packages(self, found: Sequence[Change], *, built: bool) -> Iterator[str]:
        added = [change.what for change in found if change.then == ABSENT]
        wanted = [change.what for change in found if change.then != ABSENT]
        if built and "torch" in self._then.packages and "torch" not in wanted:
            wanted.append("torch")  # the same version, another build
        if added:
            yield f"pip uninstall --yes {' '.join(map(shlex.quote, added))}"
        folders = [name for name in wanted if self._origin(name).startswith("file:")]
        for name in folders:
            yield f"# {name} {self._then.packages[name]} was installed from a folder: install it anew"
        wanted = [name for name in wanted if name not in folders]
        if wanted:
            file = f"{self._tag.name}-constraints.txt"
            yield f"{self._show('constraints')} > {shlex.quote(file)}"
            words = [
                "pip",
                "install",
                *self._again(found, wanted),
                "-c",
                file,
                *self._index(wanted),
            ]
            yield shlex.join([*words, *map(self._requirement, wanted)])

    def _again(self, found: Sequence[Change], wanted: Sequence[str]) -> list[str]:
        """pip leaves alone what has the right version, whoever built it."""
        changed = {change.what for change in found}
        return ["--force-reinstall", "--no-deps"] if set(wanted) - changed else []

    def _origin(self, name: str) -> str:
        return self._then.origins.get(name, "")

    def _requirement(self, name: str) -> str:
        origin = self._origin(name)
        return f"{name} @ {origin}" if origin else f"{name}=={self._then.packages[name]}"

    def _index(self, wanted: Sequence[str]) -> list[str]:
        """Where pip finds torch's builds for one platform."""
        local = self._then.packages.get("torch", "").partition("+")[2]
        ours = any(name.startswith(("torch", "pytorch", "triton", "nvidia")) for name in wanted)
        if not ours or not re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", local):
            return []
        return ["--extra-index-url", INDICES + local]

    def _variables(self, found: Sequence[Change]) -> Iterator[str]:
        for change in found:
            if change.then == ABSENT:
                yield f"unset {change.what}"
            else:
                yield f"export {change.what}={shlex.quote(change.then)}"

    def _sources(self, found: Sequence[Change]) -> Iterator[str]:
        known = {source.module: source for source in self._then.sources}
        groups: dict[tuple[str, str], list[str]] = {}
        for change in found:
            source = known.get(change.what)
            place = None if source is None else _checked_out(source)
            if source is None or source.commit is None or source.path is None or place is None:
                yield f"# {change.what}: bring back the source whose syntax tree is {change.then}"
                continue
            if source.changed:
                yield (
                    f"# {change.what} had changes that no commit holds; {source.commit[:12]} is what "
                    "they were made to"
                )
            groups.setdefault((str(place), source.commit), []).append(source.path)
        for (root, commit), paths in groups.items():
            yield shlex.join(["git", "-C", root, "checkout", commit, "--", *sorted(paths)])

    def _by_hand(self, found: Sequence[Change]) -> Iterator[str]:
        for change in found:
            name = change.what
            if name.startswith("inductor."):
                name = f"torch._inductor.config.{name.partition('.')[2]}"
            yield f"# {name} was {_brief(change.then)}, is {_brief(change.now)}: set in code"

    def _machine(self, found: Sequence[Change]) -> Iterator[str]:
        for change in found:
            yield f"# {change.what} was {_brief(change.then)}: run on such a machine"


def _checked_out(source: SourceFile) -> Path | None:
    """The git work tree in which the module lies here; None when it lies in none."""
    try:
        path = source_file(source.module)
    except (ImportError, ValueError):
        path = None
    # A module that is gone: its work tree is most likely the one that one stands in.
    place = work_tree(path if path is not None else Path.cwd() / "gone")
    return None if place is None else place[0]


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}…"
