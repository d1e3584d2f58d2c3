"""What only a GPU can decide, in a traced graph or a setting: refused in words, with the line that asks for it.

For programs compiled where their GPU is not. Importing this module imports torch, not its compiler.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch

NO_LINE = "no line of yours"


class Refused(Exception):
    """Something that only a real GPU can answer was asked; in words, with the line that asked."""


class Unplaced(Refused):
    """The same where nobody knows the line yet: an operation, and why. ``words_of`` finds the line."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why = what, why


_SETTINGS = {
    "max_autotune": "torch would time kernels while it compiles",
    "max_autotune_gemm": "torch would time kernels while it compiles",
    "max_autotune_pointwise": "torch would time kernels while it compiles",
    "coordinate_descent_tuning": "torch compiles and times kernels at the first call",
    "benchmark_fusion": "torch would time kernels while it compiles",
    "benchmark_combo_kernel": "torch would time kernels while it compiles",
    "cpp_wrapper": "torch would run kernels while it compiles",
    "freezing": "parameters would become part of the code, and here they have no values",
    "triton.multi_kernel": "torch times two kernels for one at the first call",
    "triton.cudagraphs": "CUDA graphs belong to the thread that records them",
}
"""Options of Inductor that nobody can honour without a GPU, and why."""

_ASK = {
    "scaled_dot_product_attention": "torch asks the GPU which kernel it takes, where no profile answers",
    "_native_multi_head_attention": "torch asks the GPU which kernel it takes",
    "_transformer_encoder_layer_fwd": "torch asks the GPU which kernel it takes",
    "triton_kernel_wrapper_mutation": "a Triton kernel of your own is launched in another way than "
    "torch's",
    "triton_kernel_wrapper_functional": "a Triton kernel of your own is launched in another way than "
    "torch's",
}
"""Operations whose code the GPU itself decides, and why."""

_ANSWERED = "record the answer on one with 'compilecache gpu-profile --plan'"
ATTENTION = (
    f"torch asks the GPU which kernel it takes; {_ANSWERED}, use flex_attention, or allow the math "
    "kernel alone (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
)
UNKNOWN = "torch would run it on the GPU to see the shape of what it gives"
UNFIT = "the profile's answer does not fit this torch; record it anew"
PADDING = (
    f"torch would time on the GPU whether padding it pays; {_ANSWERED}, or set shape_padding to "
    "false in options of the plan's compile_options"
)
MEMORY = "no configuration of its kernel fits the GPU's shared memory"


def refuse_settings(chosen: Mapping[str, object], config: object) -> None:
    """Raises Refused for a setting that makes torch ask a GPU.

    ``chosen``: options of this very compile; ``config``: what holds otherwise.
    """
    for name, why in _SETTINGS.items():
        if chosen.get(name, _setting(config, name)):
            raise Refused(f"the setting {name} of torch's Inductor is on: {why}")


def _setting(config: object, name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def refuse_operations(graph: torch.fx.GraphModule, attentions: int = 0) -> None:
    """Raises Refused for an operation of a traced graph, or of a graph in it, that the GPU decides.

    ``attentions``: how many have been answered while it was traced; each is asked about at least once.
    """
    for node in _nodes(graph):
        name = operation(node)
        if name == "scaled_dot_product_attention" and attentions > 0:
            attentions -= 1
        elif name in _ASK:
            raise Refused(f"{name}, at {node_line(node)}: {_ASK[name]}")


def operation(node: torch.fx.Node) -> str:
    """Its name, without its overload: "scaled_dot_product_attention"."""
    return plain(node.target)


def plain(function: object) -> str:
    """The same of what a node calls."""
    return str(getattr(function, "__name__", function)).partition(".")[0]


def _nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


# -- lines -------------------------------------------------------------------------------------


def user_line(frames: traceback.StackSummary) -> str:
    """The innermost line that is not torch's own nor this library's: "model.py:70 in forward"."""
    for frame in reversed(frames):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return NO_LINE


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's own, nor Triton's, nor this library's."""
    torchs = Path(torch.__file__).parent
    own = (torchs, torchs.with_name("triton"), Path(__file__).parent)
    return not filename.startswith((*(f"{folder}{os.sep}" for folder in own), "<"))


def node_line(node: torch.fx.Node) -> str:
    """Where in somebody's source a node was traced: "model.py:70 in forward"."""
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', node.stack_trace or "")
    path, number, function = frames[-1] if frames else ("", "", "")
    return f"{path}:{number} in {function}" if path else NO_LINE


def kernel_line(error: BaseException, kernel: str, graph: torch.fx.GraphModule) -> str:
    """The line of the first operation that a kernel of the graph's generated code was made of.

    ``error``: one that was raised while that code was run.
    """
    names = _sources_of(error.__traceback__, kernel)
    traced = {node.name: node for node in _nodes(graph)}
    lines = [node_line(traced[name]) for name in names if name in traced]
    return next((line for line in lines if line != NO_LINE), NO_LINE)


def _sources_of(found: TracebackType | None, kernel: str) -> list[str]:
    """Names of traced operations, as the comment before the kernel's source lists them."""
    for frame, _ in traceback.walk_tb(found):
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "<module>" and path.is_file():
            before, defined, _ = path.read_text(encoding="utf-8").partition(f"\n{kernel} = ")
            listed = re.findall(r"^# .*Source Nodes: \[(.*?)\]", before, re.MULTILINE)
            if defined and listed:
                return [name.strip() for name in listed[-1].split(",")]
    return []


def words_of(error: BaseException) -> str:
    """What went wrong, in one line, with the innermost line of the workload."""
    errors = [error]
    while (under := errors[-1].__cause__ or errors[-1].__context__) is not None:
        errors.append(under)
    for found in errors:
        if isinstance(found, Unplaced):
            return f"{found.what}, at {_traced_line(errors)}: {found.why}"
        if isinstance(found, Refused):
            return str(found)
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first} (at {_traced_line(errors)})"


def _traced_line(errors: Sequence[BaseException]) -> str:
    """The line that Dynamo was at, or of what torch was about to replace, or else where Python was."""
    stacks = [getattr(error, "real_stack", None) for error in errors]
    places = [user_line(stack) for stack in stacks if stack is not None]
    tracebacks = [error.__traceback__ for error in errors]
    for frame, _ in chain.from_iterable(map(traceback.walk_tb, tracebacks)):
        nodes = getattr(frame.f_locals.get("match"), "nodes", [])
        places += [node_line(node) for node in reversed(nodes) if isinstance(node, torch.fx.Node)]
    places += [user_line(traceback.extract_tb(found)) for found in tracebacks]
    return next((place for place in places if place != NO_LINE), NO_LINE)
