"""The kinds of faults: one trial is one fault, what it did, and what came after it.

After every fault: nothing damaged lies in the root or is published, whatever was published comes back
byte by byte, the next run completes, and a pod that starts from nothing then restores everything.
"""

from __future__ import annotations

import random
import shutil
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from ground import Address, Ground
from pod import Said, Task, published
from processes import Running
from proxy import Proxy
from scene import Scene

SCENES = 8
"""Different ones that restorers are given in turn."""


@dataclass
class Outcome:
    """What one trial came to. All lists are empty when all is well."""

    kind: str
    number: int
    struck: bool = False
    """Whether the fault took effect before the run was over; else nothing was tried."""
    damaged: list[str] = field(default_factory=list)
    """Damage that was activated in a root, or published."""
    lost: list[str] = field(default_factory=list)
    """Published targets that did not come back."""
    unfinished: list[str] = field(default_factory=list)
    """Why a later run did not complete."""
    crashed: list[str] = field(default_factory=list)
    """How the run itself ended where it should have ended well or with an error of ours."""
    twice: list[str] = field(default_factory=list)
    """Targets that two living pods compiled."""

    @property
    def well(self) -> bool:
        """Whether nothing is to be said."""
        return not (self.damaged or self.lost or self.unfinished or self.crashed or self.twice)


class Trial(ABC):
    """One fault. ``chance`` decides everything that is left open."""

    kind: ClassVar[str]

    def __init__(self, ground: Ground, proxy: Proxy, seed: int, number: int, attempt: int) -> None:
        self.ground, self.proxy = ground, proxy
        self.chance = random.Random(f"{seed} {self.kind} {number} {attempt}")
        self.folder = ground.new_folder()
        self.root = self.folder / "root"
        self.outcome = Outcome(self.kind, number)
        self.s3 = number % 4 == 3
        self.restores = self.chance.random() < 0.5
        self.scene = Scene(f"{seed}-{number % SCENES}")
        self.address = Address("")

    def run(self) -> Outcome:
        """Tries it, looks, goes on, looks again."""
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.prepare(stack)
            before = self.known()
            said = self.strike()
            if self.outcome.struck:
                self.look(said, before)
                self.mend()
                self.go_on()
            if not self.restores or self.harms_the_store:
                self.address.objects.drop()
        return self.outcome

    harms_the_store: ClassVar[bool] = False

    def prepare(self, stack: ExitStack) -> None:
        """The store: all of the scene for who restores, nothing for who makes it."""
        if self.restores:
            self.address = self.ground.published(self.scene, s3=self.s3)
        else:
            self.address = self.ground.new_address(s3=self.s3, folder=self.folder)

    def known(self) -> set[str]:
        """Keys that are published before anything happens."""
        return set(self.scene.targets) if self.restores else set()

    @abstractmethod
    def strike(self) -> Said | None:
        """Lets it happen; what the pod said, if it lived."""

    def mend(self) -> None:  # noqa: B027 - most are over by then
        """Ends what would go on."""

    # -- pods -----------------------------------------------------------------------------------

    def task(self, root: Path | None = None) -> Task:
        """A run that nothing befalls."""
        return Task(
            self.scene,
            root or self.root,
            self.address.url,
            self.folder / "said",
            restores=self.restores,
            options=self.address.options(),
            lease=0.6,
            beat=0.1,
        )

    def end_of(self, pod: Running) -> Said:
        """What it says."""
        return self.ground.finish(pod)

    # -- looking --------------------------------------------------------------------------------

    def look(self, said: Said | None, before: set[str]) -> None:
        """Right after the fault."""
        if said is not None:
            # A warm-up is part of a training run: trouble with the cache is said and never ends it.
            ends = said.crash or ("" if self.restores else said.error)
            self.outcome.crashed += [ends] if ends else []
        scratch = self.folder / "scratch"
        store = self.address.mirror(self.folder / "mirror")
        self.outcome.damaged += self.scene.wrong_in_root(self.root)
        if not self.harms_the_store:
            self.outcome.damaged += self.scene.wrong_in_store(store, scratch)
        known = before | published(self.folder / "said")
        self.outcome.lost += self.scene.lost(store, known, scratch)

    def go_on(self) -> None:
        """The next run; and one that starts from nothing, where the store has changed."""
        again = self.end_of(self.ground.start(self.task()))
        if self.harms_the_store and self.restores:
            again = self.end_of(self.ground.start(replace(self.task(), restores=False)))
        self._complete("the next run", self.root, again)
        if self.restores and not self.harms_the_store:
            return
        fresh = replace(self.task(self.folder / "fresh"), restores=True)
        self._complete("a fresh root", fresh.root, self.end_of(self.ground.start(fresh)))

    def _complete(self, who: str, root: Path, said: Said) -> None:
        bad = [*said.missing, *filter(None, (said.refused, said.error, said.crash))]
        self.outcome.unfinished += [f"{who}: {word} {said.troubles}" for word in bad]
        self.outcome.damaged += [f"{who}: {word}" for word in self.scene.wrong_in_root(root)]
        have = {path.stem for path in root.glob(".compilecache/records/*/*.json")}
        self.outcome.unfinished += [f"{who}: no {key}" for key in self.scene.targets.keys() - have]
