"""What threads hand each other: batches from targets to drafters, gradients among drafters.

Every wait ends when the crew stops: a thread that fails never leaves another one waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

POLL_SECONDS = 0.1
"""How long a waiting thread may miss that another one has failed."""


class Stops(Protocol):
    """The crew, as far as waiting threads need it."""

    @property
    def stopping(self) -> threading.Event:
        """Set when all threads should end."""

    def check(self) -> None:
        """Raises once a thread has failed or the run was told to stop."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A micro-batch on the device of its drafter."""

    number: int
    """Which one, counted from 0 over the whole run."""
    input_ids: Tensor
    """``[B, S] int64``."""
    hidden_states: Tensor
    """``[B, S, T·H]``, in the drafter's dtype."""
    loss_mask: Tensor
    """``[B, S] bool``."""
    tokens: int
    """Tokens that are no pads."""


class Inbox:
    """The deliveries for one drafter, taken in the order of their numbers whoever is first.

    At most ``size`` of them wait. The one that is due always finds room, so targets that work
    through their numbers in order never block each other for good.
    """

    def __init__(self, size: int, crew: Stops, *, first: int, stride: int) -> None:
        """The numbers are ``first``, ``first + stride``, and so on."""
        self._size = size
        self._stride = stride
        self._due = first
        self._crew = crew
        self._held: dict[int, Delivery] = {}
        self._changed = threading.Condition()

    def put(self, delivery: Delivery) -> None:
        """Waits for room, then leaves the delivery here. Raises when the crew stops."""

        def has_room() -> bool:
            return delivery.number < self._due + self._size * self._stride

        with self._changed:
            _await(self._changed, has_room, self._crew)
            self._held[delivery.number] = delivery
            self._changed.notify_all()

    def take(self) -> Delivery:
        """Waits for the delivery that is due. Raises when the crew stops."""
        with self._changed:
            _await(self._changed, lambda: self._due in self._held, self._crew)
            delivery = self._held.pop(self._due)
            self._due += self._stride
            self._changed.notify_all()
        return delivery


class Meeting:
    """A barrier that gives way when the crew stops."""

    def __init__(self, parties: int, crew: Stops) -> None:
        self._parties = parties
        self._crew = crew
        self._arrived = 0
        self._times = 0
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Returns when all parties have come. Raises when the crew stops."""
        with self._changed:
            this = self._times
            self._arrived += 1
            if self._arrived == self._parties:
                self._arrived = 0
                self._times += 1
                self._changed.notify_all()
            _await(self._changed, lambda: self._times != this, self._crew)


class Averaging:
    """Replaces the gradients of all replicas by their mean, whatever devices they are on.

    Replica ``r`` averages parameters ``r, r + D, …`` for all, in float32 and in the order of the
    replicas, so the result does not depend on which thread comes first.
    """

    def __init__(self, replicas: Sequence[Sequence[Tensor]], crew: Stops) -> None:
        """``replicas`` holds the trained parameters of each, in one order."""
        self._replicas = replicas
        self._meeting = Meeting(len(replicas), crew)

    def average(self, place: int) -> None:
        """To be called by the thread of every replica after its backward. Raises when the crew stops."""
        if len(self._replicas) == 1:
            return
        self._meeting.wait()
        for index in range(place, len(self._replicas[0]), len(self._replicas)):
            self._average(index, self._replicas[place][index].device)
        self._meeting.wait()

    @torch.no_grad()
    def _average(self, index: int, device: torch.device) -> None:
        gradients = []
        for replica in self._replicas:
            gradient = replica[index].grad
            assert gradient is not None
            gradients.append(gradient)
        mean = gradients[0].to(device, torch.float32, copy=True)
        for gradient in gradients[1:]:
            mean += gradient.to(device, torch.float32)
        mean /= len(gradients)
        for gradient in gradients:
            gradient.copy_(mean)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device, without waiting for what that device has to do first."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _await(changed: threading.Condition, holds: Callable[[], bool], crew: Stops) -> None:
    """Waits, holding the condition, until something holds. Raises when the crew stops."""
    while not holds():
        crew.check()
        changed.wait(POLL_SECONDS)
