"""What the threads of a training run do: one function for a target, one for a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_model.handover import Averaging, Delivery, Inbox, Stops, sent
from dflash_model.microbatch import MicroBatches, random_numbers
from dflash_model.model import Drafter
from dflash_model.optimizer import Optimizer
from dflash_model.target import Target

if TYPE_CHECKING:
    from compilecache import Warm


@dataclass(frozen=True, slots=True)
class Course:
    """The steps ahead, the same for every thread."""

    batches: MicroBatches
    """Their data."""
    first_step: int
    """Number of the first one, counted from 1."""
    last_step: int
    """Number of the last one."""
    targets: int
    """Threads that make hidden states."""
    drafters: int
    """Threads that learn."""
    seed: int
    """Of the anchors."""

    def numbers_of_target(self, place: int) -> Iterator[int]:
        """The micro-batches that a target makes, in order."""
        first = (self.first_step - 1) * self.drafters
        numbers = range(first, self.last_step * self.drafters)
        return (number for number in numbers if number % self.targets == place)


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """Makes the hidden states of every T-th micro-batch and brings them to its drafter."""

    place: int
    """Which of the targets."""
    target: Target
    """The model it runs."""
    course: Course
    """The steps ahead."""
    drafters: Sequence[Drafter]
    """For whom."""
    inboxes: Sequence[Inbox]
    """Where it leaves them, one inbox for each drafter."""
    crew: Stops
    """Those who stop together."""

    def run(self) -> None:
        """The whole thread."""
        with _on(self.target.device):
            for number in self.course.numbers_of_target(self.place):
                self.crew.check()
                drafter = number % self.course.drafters
                self.inboxes[drafter].put(self._make(number, self.drafters[drafter].fc.weight))

    @torch.no_grad()
    def _make(self, number: int, like: Tensor) -> Delivery:
        batch = self.course.batches.at(number)
        hidden = self.target.hidden(batch).to(like.device, like.dtype)
        ids, learned = (sent(t, like.device) for t in (batch.input_ids, batch.loss_mask))
        return Delivery(number, ids, hidden, learned, batch.tokens)


@dataclass(frozen=True, slots=True)
class Told:
    """What one drafter says of one step."""

    loss: Tensor
    """A scalar, on the drafter's device."""
    tokens: int
    """Tokens of its micro-batch, pads left out."""


class DrafterWorker:
    """Takes micro-batches, averages gradients with the others, steps its replica."""

    def __init__(
        self,
        place: int,
        drafter: Drafter,
        optimizer: Optimizer,
        inbox: Inbox,
        averaging: Averaging,
        course: Course,
        *,
        warm: Warm | None,
    ) -> None:
        self._place = place
        self._drafter = drafter
        self._optimizer = optimizer
        self._inbox = inbox
        self._averaging = averaging
        self._course = course
        self._warm = warm
        self.device = drafter.fc.weight.device
        self.told: dict[int, Told] = {}
        """By step, until somebody takes it out."""
        self.peaks: list[int] = []
        """Most bytes that the device held in each step; empty on a CPU."""

    def run(self, after: Callable[[int, Tensor], None] | None = None) -> None:
        """The whole thread; ``after`` is called with each step's number and norm of the gradient."""
        self._drafter.train()
        with _on(self.device):
            for step in range(self._course.first_step, self._course.last_step + 1):
                norm = self._step(step)
                self._measure()
                if after is not None:
                    after(step, norm)

    def _step(self, step: int) -> Tensor:
        delivery = self._inbox.take()
        self.told[step] = Told(self._learn(delivery), delivery.tokens)
        self._averaging.average(self._place)
        return self._optimizer.step(step)

    def _learn(self, delivery: Delivery) -> Tensor:
        """Forward and backward of one micro-batch, with nothing in it that waits for a thread."""
        with nullcontext() if self._warm is None else self._warm.step():
            batch = self._drafter.prepare(
                delivery.input_ids,
                delivery.hidden_states,
                delivery.loss_mask,
                generator=random_numbers(self._course.seed, delivery.number, self.device),
            )
            loss: Tensor = self._drafter(**batch)
            torch.autograd.backward(loss)
        return loss.detach()

    def _measure(self) -> None:
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one of this thread."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
