"""Every private name of Inductor and of its use of Triton, in one place, each behind a probe.

``missing()`` lists what this torch does not have, as in ``torch_names``.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilecache.torch_names import absent


@contextmanager
def compiling_in_process() -> Iterator[None]:
    """Any code generation happens in this process, where it is seen; no worker pool is started."""
    import torch._inductor.config as config

    with config.patch(compile_threads=1):
        yield


def settings() -> dict[str, str]:
    """The settings of Inductor that enter its cache key and differ from torch's defaults."""
    import torch._inductor.config as config

    # Not _is_default: it calls a setting changed once torch itself has patched it and set it back.
    defaults = config._config  # type: ignore[attr-defined]
    return {
        name: repr(value)
        for name, value in sorted(config.save_config_portable().items())
        if name in defaults and value != defaults[name].default
    }


def bundles_triton() -> bool:
    """Whether Triton's binaries travel inside the FX-graph entries."""
    import torch._inductor.config as config

    value = config.bundle_triton_into_fx_graph_cache
    return value is None or bool(value)


@contextmanager
def noting_bundled(kernels: set[str]) -> Iterator[None]:
    """Collects the names of kernel folders that FX-graph entries carry, written or read meanwhile."""
    from torch._inductor.triton_bundler import TritonBundle, TritonBundler

    def note(bundle: TritonBundle) -> None:
        kernels.update(kernel.kernel_hash for kernel in bundle.kernel_artifacts)

    collect, emit = vars(TritonBundler)["collect"], vars(TritonBundler)["read_and_emit"]

    def collecting(cls: type[TritonBundler]) -> Any:
        collected = collect.__get__(None, cls)()
        note(collected[0])
        return collected

    def emitting(bundle: TritonBundle) -> Any:
        note(bundle)
        return emit.__get__(None, TritonBundler)(bundle)

    setattr(TritonBundler, "collect", classmethod(collecting))  # noqa: B010
    setattr(TritonBundler, "read_and_emit", staticmethod(emitting))  # noqa: B010
    try:
        yield
    finally:
        setattr(TritonBundler, "collect", collect)  # noqa: B010
        setattr(TritonBundler, "read_and_emit", emit)  # noqa: B010


@dataclass(frozen=True, slots=True)
class Bypass:
    """Why torch would not cache a graph."""

    reason: str
    """In torch's words, one line."""
    node: str = ""
    """The operation of the graph that it stumbled over; empty when it was none."""
    line: str = ""
    """Where in somebody's source that operation was traced."""


@contextmanager
def noting_bypasses() -> Iterator[dict[str, Bypass]]:
    """Collects why graphs are passed by, by reason: torch itself only counts and logs it."""
    import torch._functorch._aot_autograd.autograd_cache as cache
    from torch._inductor.codecache import BypassFxGraphCache

    noted: dict[str, Bypass] = {}

    def note(error: BaseException, node: Any = None) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, cache.FXGraphCacheMiss):
            return
        if node is not None:
            noted[reason] = Bypass(reason, str(node.name), _last_line(node.stack_trace or ""))
        noted.setdefault(reason, Bypass(reason))

    def telling(act: Callable[..., Any], *, node: bool) -> Callable[..., Any]:
        def told(*args: Any, **named: Any) -> Any:
            try:
                return act(*args, **named)
            except Exception as error:
                note(error, args[0] if node else None)
                raise

        return told

    with ExitStack() as stack:
        for name in ("check_node_safe", "autograd_cache_key"):
            act = getattr(cache, name)
            setattr(cache, name, telling(act, node=name == "check_node_safe"))
            stack.callback(setattr, cache, name, act)
        for kind in (cache.BypassAOTAutogradCache, BypassFxGraphCache):
            stack.enter_context(_noting_made(kind, note))
        yield noted


def _last_line(trace: str) -> str:
    """The innermost frame of a stack as torch notes it: "train.py:70 in forward"."""
    frames = re.findall(r'^\s*File "(.+)", line (\d+), in (.+)$', trace, re.M)
    path, number, function = frames[-1] if frames else ("", "", "")
    return f"{path}:{number} in {function}" if path else ""


@contextmanager
def _noting_made(kind: type[Exception], note: Callable[[BaseException], None]) -> Iterator[None]:
    """Hears of every error of a kind when it is made: some are caught where nobody else looks."""
    before = vars(kind).get("__init__")

    def init(self: Exception, *args: object) -> None:
        Exception.__init__(self, *args)
        note(self)

    setattr(kind, "__init__", init)  # noqa: B010
    try:
        yield
    finally:
        if before is None:
            delattr(kind, "__init__")
        else:
            setattr(kind, "__init__", before)  # noqa: B010


def settle_ptxas() -> None:
    """Lets Triton use the same ptxas in this process as in Inductor's compile workers, from now on.

    Triton's key of a kernel holds the version of ptxas. Workers take the one that torch brings along
    at once, a process that only loads takes it late or never: it would look for kernels of the
    other version, and compile those it has to look up.
    """
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    before = os.environ.get("TRITON_PTXAS_PATH")
    _set_triton_ptxas_path()
    if os.environ.get("TRITON_PTXAS_PATH") == before:
        return
    try:
        compiler = importlib.import_module("triton.backends.nvidia.compiler")
    except ImportError:
        return
    for answered in (compiler.get_ptxas_version, compiler.CUDABackend.hash):
        getattr(answered, "cache_clear", int)()


def default_cache_dir() -> str:
    """Where Inductor would put its cache if nobody says otherwise."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir as directory

    try:
        return directory()
    except (KeyError, OSError):
        # 140765: older torch wants a passwd entry for the user; newer names the folder so.
        return str(Path(tempfile.gettempdir(), f"torchinductor_uid_{os.getuid()}"))


def forget_loaded() -> None:
    """Drops Inductor's memory of loaded libraries, so that a target shows every file it needs.

    Functions that are loaded stay loaded; the next one just opens its files again.
    """
    from torch._inductor.utils import clear_caches

    clear_caches()


def probe_vector_sets() -> None:
    """Lets Inductor find out the CPU's vector instructions now, whether or not it has before.

    It does so by compiling small libraries into the cache root, once per process.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for kind in {kind for isa in cpu_vec_isa.supported_vec_isa_list for kind in type(isa).__mro__}:
        for answer in ("_VecISA__bool__impl", "__bool__"):
            getattr(vars(kind).get(answer), "cache_clear", int)()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        vars(isa).clear()  # what an earlier answer added to its flags
    cpu_vec_isa.pick_vec_isa()


class Traced(BaseException):
    """A graph has been traced; nothing of torch is to take it for a failure."""


@contextmanager
def tracing_only() -> Iterator[None]:
    """Where torch would begin to generate code Traced is raised: it has asked all that it asks before."""
    from torch._inductor.graph import GraphLowering

    lower = GraphLowering.run

    def run(*args: Any, **named: Any) -> Any:
        raise Traced

    GraphLowering.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering.run = lower  # type: ignore[method-assign]


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(
        {
            "torch._inductor.config": [
                "compile_threads",
                "save_config_portable",
                "_config",
                "bundle_triton_into_fx_graph_cache",
            ],
            "torch._inductor.runtime.cache_dir_utils": ["default_cache_dir"],
            "torch._inductor.runtime.compile_tasks": ["_set_triton_ptxas_path"],
            "torch._inductor.triton_bundler": [
                "TritonBundler.collect",
                "TritonBundler.read_and_emit",
            ],
            "torch._functorch._aot_autograd.autograd_cache": [
                "check_node_safe",
                "autograd_cache_key",
                "BypassAOTAutogradCache",
                "FXGraphCacheMiss",
            ],
            "torch._inductor.codecache": ["BypassFxGraphCache"],
            "torch._inductor.graph": ["GraphLowering.run"],
            "torch._inductor.utils": ["clear_caches"],
            "torch._inductor.cpu_vec_isa": [
                "valid_vec_isa_list",
                "supported_vec_isa_list",
                "pick_vec_isa",
            ],
        }
    )
