"""The optimizer of one replica: AdamW in float32, a cosine with warm-up, clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_model.model import Drafter

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every step: up in a line, then down to 0 along a cosine."""

    peak: float
    """The largest learning rate."""
    steps: int
    """Optimizer steps of the whole run."""
    warmup_ratio: float
    """Share of the steps in which the learning rate rises."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        rising = round(self.steps * self.warmup_ratio)
        if step <= rising:
            return self.peak * step / rising
        share = (step - rising) / max(1, self.steps + 1 - rising)
        return self.peak * (1 + math.cos(math.pi * share)) / 2


class Optimizer:
    """AdamW over the trained parameters of a drafter.

    Parameters of a narrower dtype than float32 have a float32 copy that is stepped in their place
    and rounded back: with bfloat16 alone, updates late in the cosine would be rounded away.
    """

    def __init__(self, drafter: Drafter, schedule: Schedule, clip: float) -> None:
        self._schedule = schedule
        self._clip = clip
        self.trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        """The parameters by their published names."""
        self._wide = {name: _wide(parameter) for name, parameter in self.trained.items()}
        self._adam = torch.optim.AdamW(self._wide.values(), lr=schedule.peak)

    def step(self, step: int) -> Tensor:
        """Makes step number ``step`` from the gradients and drops them; their norm before the clip."""
        for name, parameter in self.trained.items():
            wide = self._wide[name]
            if wide is not parameter:
                assert parameter.grad is not None
                wide.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._wide.values(), self._clip)
        for group in self._adam.param_groups:
            group["lr"] = self._schedule.rate(step)
        self._adam.step()
        self._adam.zero_grad()
        self._round_back()
        return norm

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of ``state`` after a step."""
        kinds = (*_MOMENTS, *(["wide"] if self._has_copies else []))
        return {
            f"{kind}.{name}": tuple(wide.shape)
            for kind in kinds
            for name, wide in self._wide.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step needs besides the parameters and the step number."""
        state = {
            f"{moment}.{name}": self._adam.state[wide][moment]
            for moment in _MOMENTS
            for name, wide in self._wide.items()
        }
        if self._has_copies:
            state |= {f"wide.{name}": wide.detach() for name, wide in self._wide.items()}
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Takes up the ``state`` after step number ``step``; the parameters come on their own."""
        for name, wide in self._wide.items():
            wide.copy_(state[f"wide.{name}"] if self._has_copies else self.trained[name])
            moments = {m: state[f"{m}.{name}"].to(wide.device, copy=True) for m in _MOMENTS}
            self._adam.state[wide] = {"step": torch.tensor(float(step)), **moments}

    @property
    def _has_copies(self) -> bool:
        return any(self._wide[name] is not p for name, p in self.trained.items())

    @torch.no_grad()
    def _round_back(self) -> None:
        for name, parameter in self.trained.items():
            if self._wide[name] is not parameter:
                parameter.copy_(self._wide[name])


def _wide(parameter: Tensor) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
