"""What only a GPU can decide, in a traced graph or a setting: refused in words, with the line that asks for it.

For programs compiled where their GPU is not. Importing this module imports torch, not its compiler.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch

NO_LINE = "no line of yours"


class Refused(Exception):
    """Something that only a real GPU can answer was asked; in words, with the line that asked."""


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
    "scaled_dot_product_attention": "torch asks the GPU which kernel it takes; use flex_attention, "
    "or allow the math kernel alone (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))",
    "_native_multi_head_attention": "torch asks the GPU which kernel it takes",
    "_transformer_encoder_layer_fwd": "torch asks the GPU which kernel it takes",
    "triton_kernel_wrapper_mutation": "a Triton kernel of your own is launched in another way than "
    "torch's",
    "triton_kernel_wrapper_functional": "a Triton kernel of your own is launched in another way than "
    "torch's",
}
"""Operations whose code the GPU itself decides, and why."""

PADDING = (
    "torch would time on the GPU whether padding it pays; set shape_padding to false in options of "
    "the plan's compile_options"
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


def refuse_operations(graph: torch.fx.GraphModule) -> None:
    """Raises Refused for an operation of a traced graph, or of a graph in it, that the GPU decides."""
    for node in _nodes(graph):
        name = operation(node)
        if name not in _ASK or (name == "scaled_dot_product_attention" and _only_math(graph)):
            continue
        raise Refused(f"{name}, at {node_line(node)}: {_ASK[name]}")


def operation(node: torch.fx.Node) -> str:
    """Its name, without its overload: "scaled_dot_product_attention"."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _only_math(graph: torch.fx.GraphModule) -> bool:
    """Whether the one kernel of attention that is allowed needs nobody to be asked.

    What is allowed may change inside of the graph: then it is not looked at any closer.
    """
    backends: object = torch.backends.cuda
    fused = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
    if any(operation(node).startswith("_sdpa_kernel") for node in _nodes(graph)):
        return False
    return not any(getattr(backends, name)() for name in fused)


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
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Refused):
            return str(found)
        found = found.__cause__ or found.__context__
    first = (str(error).strip().splitlines() or [""])[0][:300]
    where = user_line(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {first} (at {where})"
