"""What a plan may say when it comes over the network: no code, no compiler, no path of its choice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from compilecache.shapes import InputSpec, ShapePlan, TensorSpec
from warmup.service.problems import Refusal

HARMLESS = frozenset({"fullgraph", "mode"})
"""Compile options that every plan may set."""
MODES = frozenset({"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"})
TEXT_LIMIT = 200
"""Letters of any text in a plan."""
TARGET_LIMIT = 1024
"""Targets of one job."""

_PATH = re.compile(r"[/\\]|\.\.|^~|^[\w.]+:[\w.]+$")
"""What names a file, or code: a plan that comes over the network names neither, but its workload."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Policy:
    """The allow-lists of one service."""

    def __init__(
        self, workloads: Sequence[str], compile_options: Sequence[str], devices: Sequence[str]
    ) -> None:
        self._workloads = workloads
        self._options = HARMLESS | set(compile_options)
        self.devices = tuple(devices)

    def check(self, plan: ShapePlan, devices: Sequence[str]) -> None:
        """Raises Refusal for what this service does not do for anybody."""
        self._check_workload(plan.workload)
        self._check_options(plan.compile_options)
        self._check_devices(devices)
        for where, text in texts(plan):
            check_text(where, text)
        count = len(plan.specs) * len(devices)
        if count > TARGET_LIMIT:
            raise Refusal(
                422,
                f"the plan makes {count} targets, above the limit of {TARGET_LIMIT} for a job",
                next_step="Submit it in parts",
            )

    def _check_workload(self, name: str | None) -> None:
        if name is None:
            raise Refusal(
                422, "the plan names no workload", next_step="Add 'workload: module:attribute'"
            )
        if name not in self._workloads:
            raise Refusal(
                403,
                f"workload '{name[:TEXT_LIMIT]}' is not on the allow-list of this service",
                next_step="Add it to 'workloads' in the service's settings, or start it with --workload",
            )

    def _check_options(self, options: Mapping[str, JsonValue]) -> None:
        more = sorted(options.keys() - self._options)
        mode = options.get("mode", "default")
        if not more and mode in MODES:
            return
        named = more[0][:TEXT_LIMIT] if more else "mode"
        raise Refusal(
            403,
            f"compile option '{named}' cannot be chosen here: it could name code or a compiler",
            next_step="Add it to 'compile_options' in the service's settings, if you trust who submits",
        )

    def _check_devices(self, devices: Sequence[str]) -> None:
        strange = [device for device in devices if device not in self.devices]
        if strange:
            raise Refusal(
                422,
                f"this service warms nothing on '{strange[0]}'",
                next_step=f"Choose among {', '.join(self.devices)}",
            )


def check_text(where: str, text: str, *, may_name_paths: bool = False) -> None:
    """Raises Refusal for a text that is too long, holds control characters, or names a path or code."""
    if _CONTROL.search(text) or len(text) > TEXT_LIMIT:
        raise Refusal(
            422,
            f"field '{where}' has control characters, or more than {TEXT_LIMIT} letters",
            next_step="Shorten it to plain text",
        )
    if not may_name_paths and _PATH.search(text):
        raise Refusal(
            403,
            f"field '{where}' names a path or code: '{text}'",
            next_step="Let a workload on the allow-list name it, in code that the host's owner wrote",
        )


def texts(plan: ShapePlan) -> Iterator[tuple[str, str]]:
    """Every text of a plan but its workload, with the field it stands in."""
    yield from _in_value("settings", plan.settings)
    yield from _in_value("compile_options", plan.compile_options)
    for number, spec in enumerate(plan.specs):
        yield from _in_spec(f"specs.{number}", spec)


def _in_spec(where: str, spec: InputSpec) -> Iterator[tuple[str, str]]:
    yield f"{where}.function", spec.function
    yield f"{where}.dtype", spec.dtype
    yield from _in_value(f"{where}.dims", dict(spec.dims))
    for name, argument in (spec.example or {}).items():
        yield f"{where}.example", name
        plain = argument.dtype if isinstance(argument, TensorSpec) else argument
        yield from _in_value(f"{where}.example.{name}", plain)


def _in_value(where: str, value: JsonValue | Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield where, name
            yield from _in_value(f"{where}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _in_value(where, inner)
