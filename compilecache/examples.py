"""The workload of any module: plain examples instead of named dimensions.

An example is what one step is called with: keyword arguments (a mapping), positional ones (a tuple)
or a single tensor. Tensors may be on the meta device; lists, tuples and dictionaries of tensors are
named by their leaves (``compilecache.arguments``).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from compilecache.arguments import leaves, rebuild
from compilecache.errors import PlanError
from compilecache.shapes import Argument, InputSpec, Phase, TensorSpec
from compilecache.tensors import Maker, contiguous, dtype_named
from compilecache.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    Example = Mapping[str, object] | tuple[object, ...] | torch.Tensor


class ExampleWorkload(Workload):
    """Realises plain examples. Give it the examples to have their very values used.

    ``build`` names a function ``module:attribute`` that returns the module, for the command line.
    """

    def __init__(
        self,
        examples: Sequence[Example] = (),
        *,
        module: nn.Module | None = None,
        build: str | None = None,
    ) -> None:
        self._module = module
        self._build = build
        self._given = {
            _key(_described(arguments)): arguments
            for arguments in (_named(example, module) for example in examples)
        }

    def origin(self) -> tuple[str, Mapping[str, JsonValue]] | None:
        """Named only where the module can be built anew."""
        if self._build is None:
            return None
        return "compilecache.examples:ExampleWorkload", {"build": self._build}

    def check(self, spec: InputSpec) -> None:
        """Raises PlanError when the spec holds no example, or one that cannot be realised."""
        for name, value in _arguments(spec).items():
            if isinstance(value, TensorSpec):
                dtype_named(value.dtype, f"argument '{name}'")
            elif isinstance(value, dict) and "shape" in value:
                raise PlanError(
                    f"argument '{name}' looks like a tensor but is not one: {value}",
                    next_step=f"Use only the fields {', '.join(TensorSpec.model_fields)}",
                    field=name,
                )
        _rebuilt(_arguments(spec))

    def build(self, device: torch.device) -> nn.Module:
        """The module that ``build`` names, on the device. Raises PlanError without it."""
        from torch import nn

        if self._build is None:
            return super().build(device)
        module_name, _, attribute = self._build.partition(":")
        try:
            module = getattr(importlib.import_module(module_name), attribute)()
        except (ImportError, AttributeError, ValueError) as error:
            raise PlanError(
                f"'{self._build}' builds no module: {error}",
                next_step="Name a function without arguments as module:attribute",
                field="build",
            ) from error
        if not isinstance(module, nn.Module):
            raise PlanError(
                f"'{self._build}' returned a {type(module).__name__}, not a module",
                next_step="Return a torch.nn.Module from it",
                field="build",
            )
        return module.to(device)

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        """The given tensors where there are any, else: floats normal, integers zero, bools true.

        Integers of an argument whose name ends in "mask" are one: a mask of zeros hides everything.
        Tensors are new; sizes, strides and requires_grad are those of the example.
        """
        self.check(spec)
        arguments = _arguments(spec)
        given = self._given.get(_key(arguments), {})
        maker = Maker(device)
        made: dict[str, object] = {}
        for name, value in arguments.items():
            if isinstance(value, TensorSpec):
                made[name] = maker.tensor(name, value, given.get(name))
            else:
                made[name] = value
        return _rebuilt(made)

    def spec_of(self, function: str, inputs: Mapping[str, object], phase: str) -> InputSpec | None:
        """The spec of such a call; None when its arguments cannot be listed in a plan."""
        if phase not in ("train", "eval", "both"):
            return None
        try:
            arguments = _named(inputs, None)
            described = _described(arguments)
        except PlanError:
            return None
        return InputSpec(
            function=function,
            phase=cast("Phase", phase),
            dtype=_floating_dtype(self._module, arguments),
            example=described,
        )


def specs_of_examples(
    examples: Sequence[Example], module: nn.Module, phases: Sequence[str] = ("train", "eval")
) -> tuple[InputSpec, ...]:
    """Every example in every phase, phase by phase within an example.

    Raises PlanError for no example, a name that the module's forward does not take, or a value that
    a plan cannot hold.
    """
    if not examples:
        raise PlanError("there are no examples", next_step="Give at least one", field="examples")
    specs = [
        InputSpec(
            phase=_phase(phase),
            dtype=_floating_dtype(module, arguments),
            example=_described(arguments),
            positional=_positional(example),
        )
        for example, arguments in ((one, _named(one, module)) for one in examples)
        for phase in phases
    ]
    return tuple(dict.fromkeys(specs))


def default_step(
    function: Callable[..., object], inputs: Mapping[str, object], spec: InputSpec
) -> torch.Tensor | None:
    """One call; the loss is the sum of its floating outputs in float32, None without any.

    Phase train runs the backward too, where the loss requires a gradient.
    """
    loss: torch.Tensor | None = None
    named = dict(inputs)
    by_position = [named.pop(name) for name in list(named)[: spec.positional]]
    for output in _tensors(function(*by_position, **named)):
        if output.is_floating_point():
            part = output.float().sum()
            loss = part if loss is None else loss + part.to(loss.device)
    if loss is not None and spec.phase == "train" and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Tensors anywhere in an output: pytrees, mappings and dataclasses (Hugging Face's outputs)."""
    import torch
    from torch.utils import _pytree as pytree

    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _positional(example: Example) -> int:
    if isinstance(example, Mapping):
        return 0
    return len(example) if isinstance(example, tuple) else 1


def _named(example: Example, module: nn.Module | None) -> dict[str, object]:
    """An example's leaves by name. Raises PlanError for arguments that the forward does not take."""
    import torch

    if isinstance(example, torch.Tensor):
        example = (example,)
    keywords = _keywords(example, module)
    if module is not None:
        _check_names(keywords, module)
    return {name: leaf for key, value in keywords.items() for name, leaf in leaves(key, value)}


def _keywords(
    example: Mapping[str, object] | tuple[object, ...], module: nn.Module | None
) -> Mapping[str, object]:
    if isinstance(example, Mapping):
        return example
    if not isinstance(example, tuple) or module is None:
        raise PlanError(
            f"an example is a {type(example).__name__}",
            next_step="Give a dictionary of keyword arguments, a tuple, or a tensor",
            field="examples",
        )
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(example) > len(names):
        raise PlanError(
            f"an example has {len(example)} positional arguments, "
            f"{type(module).__name__}.forward names {len(names)}",
            next_step="Give the arguments by name, in a dictionary",
            field="examples",
        )
    return dict(zip(names, example, strict=False))


def _check_names(keywords: Mapping[str, object], module: nn.Module) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = next((name for name in keywords if name not in known), None)
        near = get_close_matches(unknown or "", known, n=1)
        hint = f"Did you mean '{near[0]}'" if near else f"It takes {', '.join(known)}"
        raise PlanError(
            f"{type(module).__name__}.forward does not take such an example: {error}",
            next_step=hint,
            field=unknown or "examples",
        ) from error


def _described(arguments: Mapping[str, object]) -> dict[str, Argument]:
    return {name: _argument(name, value) for name, value in arguments.items()}


def _argument(name: str, value: object) -> Argument:
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor_spec(name, value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PlanError(
        f"argument '{name}' is a {type(value).__name__}, which a plan cannot hold",
        next_step="Use tensors, numbers, strings, and lists, tuples or dictionaries of them, "
        "or write a workload (compile_workload) for the module",
        field=name,
    )


def _tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise PlanError(
            f"argument '{name}' is a tensor of layout {tensor.layout}",
            next_step="Use plain strided tensors, or write a workload for the module",
            field=name,
        )
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    plain = tensor.numel() == 0 or stride == contiguous(shape)
    return TensorSpec(
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        stride=None if plain else stride,
        requires_grad=tensor.requires_grad,
    )


def _floating_dtype(module: nn.Module | None, arguments: Mapping[str, object]) -> str:
    import torch

    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    for tensor in [*tensors, *inputs]:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _phase(phase: str) -> Phase:
    if phase not in ("train", "eval", "both"):
        raise PlanError(
            f"there is no phase '{phase}'", next_step="Use train, eval or both", field="phase"
        )
    return cast("Phase", phase)


def _arguments(spec: InputSpec) -> dict[str, Argument]:
    if spec.example is None:
        raise PlanError(
            f"spec '{spec}' holds no example",
            next_step="Add 'example' to it, or name the workload that knows its dimensions",
            field="example",
        )
    return spec.example


def _rebuilt(flat: Mapping[str, object]) -> dict[str, object]:
    try:
        return rebuild(flat)
    except ValueError as error:
        raise PlanError(
            f"the example's arguments do not fit together: {error}",
            next_step="Mend their names in the plan, or record it anew",
            field="example",
        ) from error


def _key(example: Mapping[str, Argument]) -> str:
    plain = {
        name: value.model_dump(mode="json") if isinstance(value, TensorSpec) else value
        for name, value in example.items()
    }
    return json.dumps(plain, sort_keys=True)
