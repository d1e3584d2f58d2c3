"""The one protocol a user implements: how to build, feed and step what gets compiled.

Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import JsonValue

from compilecache.errors import PlanError
from compilecache.shapes import InputSpec, ShapePlan

if TYPE_CHECKING:
    import torch
    from torch import nn


class Workload(Protocol):
    """What the library must know of a model. Subclass it to inherit the defaults below.

    Only ``make_inputs`` has no usable default; ``build`` is needed by the command line, which has
    no model of its own, and ``specs`` by ``compilecache plan``.
    """

    def config(self) -> Mapping[str, JsonValue]:
        """Everything, besides parameter shapes and sources, that changes the compiled code."""
        return {}

    def sources(self) -> Sequence[str]:
        """Names of the Python modules that get traced; their syntax trees enter the fingerprint.

        Empty: the classes of the model's submodules and what they reach in their own modules.
        """
        return ()

    def origin(self) -> tuple[str, Mapping[str, JsonValue]] | None:
        """``module:attribute`` and settings that make this workload anew; None when it has no name.

        Written into plans that are recorded from a run, so that the command line can use them.
        """
        return None

    def max_length(self) -> int | None:
        """The longest sequence that the model takes, in tokens; None when nothing limits it."""
        return None

    def specs(
        self, seq_lens: Sequence[int], *, batch_sizes: Sequence[int], phases: Sequence[str]
    ) -> Sequence[InputSpec]:
        """Every graph a run over these padded lengths will need, in the order to compile them.

        Raises PlanError for a length that the model cannot take.
        """
        raise PlanError(
            f"workload {type(self).__name__} does not say how lengths become specs",
            next_step="Implement 'specs' on it, or list the specs in a plan file",
        )

    def check(self, spec: InputSpec) -> None:
        """Raises PlanError when the spec cannot run: unknown dims, mask and query that disagree."""

    def build(self, device: torch.device) -> nn.Module:
        """A module with random parameters on the device, for warming without a trainer."""
        raise PlanError(
            f"workload {type(self).__name__} cannot build its model",
            next_step="Implement 'build' on it, or call ensure_warm with a model in hand",
        )

    def functions(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """The separately compiled functions, each a module that is compiled in place."""
        return {"forward": module}

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        """Real inputs of one step of ``spec.function``, on the device, as keyword arguments."""
        ...

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        """One step through the compiled function: forward, loss, and backward in phase train.

        Grad mode and train/eval mode are set by the caller. Returns the loss, or None.
        Default: the sum of the function's floating-point outputs is the loss.
        """
        from compilecache.examples import default_step

        return default_step(self.functions(module)[spec.function], inputs, spec)

    def spec_of(self, function: str, inputs: Mapping[str, object], phase: str) -> InputSpec | None:
        """The spec that such a call belongs to; None when it cannot be told."""
        return None


@runtime_checkable
class HasWorkload(Protocol):
    """A module that brings its workload along."""

    def compile_workload(self) -> Workload:
        """The workload of this very module, with its settings."""
        ...


def load_workload(name: str, settings: Mapping[str, JsonValue] | None = None) -> Workload:
    """The workload named ``module:attribute``: an instance, or a factory called with settings.

    Naming one runs its module. Raises PlanError naming the part that does not exist.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PlanError(
            f"'{name}' does not name a workload",
            next_step="Write it as module:attribute, for example dflash_model.workload:dflash",
            field="workload",
        )
    factory = getattr(_import(module_name, name), attribute, None)
    if factory is None:
        raise PlanError(
            f"module '{module_name}' has no workload '{attribute}'",
            next_step="Name one of its attributes, as module:attribute",
            field="workload",
        )
    if not isinstance(factory, type) and hasattr(factory, "make_inputs"):
        return _instance(factory, name, settings or {})
    return _call(factory, name, settings or {})


def workload_of_plan(plan: ShapePlan) -> Workload:
    """The workload that a plan file names. Raises PlanError when it names none."""
    if plan.workload is None:
        raise PlanError(
            "the plan names no workload",
            next_step="Add 'workload: module:attribute' to it, or pass --workload",
            field="workload",
        )
    return load_workload(plan.workload, plan.settings)


def _import(module_name: str, name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"workload '{name}' cannot be imported: no module named '{error.name}'",
            next_step="Install it, or run from the folder that holds it",
            field="workload",
        ) from error


def _instance(workload: Workload, name: str, settings: Mapping[str, JsonValue]) -> Workload:
    if settings:
        raise PlanError(
            f"workload '{name}' takes no settings, got {', '.join(sorted(settings))}",
            next_step="Remove them, or name a factory instead of an instance",
            field="settings",
        )
    return workload


def _call(
    factory: Callable[..., Workload], name: str, settings: Mapping[str, JsonValue]
) -> Workload:
    try:
        made = factory(**settings)
    except TypeError as error:
        raise PlanError(
            f"workload '{name}' refused its settings: {error}",
            next_step="Compare them with the factory's signature",
            field="settings",
        ) from error
    if isinstance(made, type) or not all(hasattr(made, part) for part in ("make_inputs", "step")):
        raise PlanError(
            f"'{name}' gave a {type(made).__name__}, which is no workload",
            next_step="Name a compilecache.Workload, or a function that returns one",
            field="workload",
        )
    return made
