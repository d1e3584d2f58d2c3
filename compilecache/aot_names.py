"""Every private name of torch that programs need, in one place, each behind a probe.

Ahead-of-time compiled functions are a new part of torch ("experimental"): how they are made, loaded
and moved to another device index stands here and nowhere else. ``missing()`` lists what this torch
does not have.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compilecache.torch_names import absent

_PLACES = {
    "torch._dynamo.aot_compile": [
        "AOTCompiledFunction.serialize",
        "AOTCompiledFunction.deserialize",
    ],
    "torch._dynamo.config": ["enable_aot_compile"],
    "torch._dynamo.package": ["load_guards_state", "load_guard_manager"],
    "torch._functorch._aot_autograd.aot_autograd_result": ["deserialize_bundled_cache_entry"],
    "torch._inductor": ["list_mode_options"],
    "torch._inductor.async_compile": ["CompiledTritonKernels.key"],
    "torch._inductor.output_code": ["CompiledFxGraph"],
    "torch._inductor.runtime.cache_dir_utils": ["cache_dir", "triton_cache_dir"],
    "torch._inductor.runtime.hints": ["DeviceProperties"],
    "torch._inductor.runtime.runtime_utils": ["triton_hash_to_path_key"],
    "torch._inductor.triton_bundler": [
        "TritonBundler.collect",
        "TritonBundler._REPLACE_BYTES",
        "TritonKernelArtifact",
        "TritonKernelArtifacts",
    ],
    "torch._C._dynamo.guards": ["GlobalStateGuard"],
    "torch._C": ["_len_torch_function_stack", "_len_torch_dispatch_stack"],
    "torch.nn.modules.module": ["_global_forward_hooks", "_global_forward_pre_hooks"],
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


# -- making ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guarded:
    """Something that the trace depended on, as torch's guards say."""

    source: str
    """The expression that gives it: ``L['self'].scale``, ``G['SCALE']``, ``L['x']``."""
    value: object
    has_value: bool
    """False where torch could not look it up, or it is not there."""
    not_in_dict: str | None = None
    """An attribute that must not be in the object's own dictionary."""


@dataclass(frozen=True, slots=True)
class Made:
    """A function compiled ahead of time."""

    data: bytes
    """What ``load`` takes."""
    guards: tuple[Guarded, ...]
    """Everything that torch would have guarded on."""
    sources: tuple[str, ...]
    """Names of the Python modules that were traced."""
    imports: Mapping[str, str]
    """Names under which torch imported modules for it."""
    function: Any = None
    """torch's own object of it, to be saved once more."""


def make(
    function: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: Mapping[str, Any],
) -> Made:
    """Compiles ``type(function).forward`` for one call in this thread's grad mode, to bytes.

    ``options``: those of ``torch.compile``. Raises whatever torch raises for what is no full graph.
    """
    import torch._dynamo.config as config

    noted: list[Guarded] = []

    def note(entries: Sequence[Any]) -> list[bool]:
        noted.extend(_guarded(entry) for entry in entries)
        return [False for _ in entries]

    choice = dict(options)
    chosen = dict(choice.pop("options", None) or {})
    if (mode := choice.pop("mode", None)) not in (None, "default"):
        chosen = {**torch._inductor.list_mode_options(mode, False), **chosen}
    chosen["guard_filter_fn"] = note
    choice |= {"fullgraph": True, "dynamic": False, "options": chosen}
    with config.patch(enable_aot_compile=True), _one_rank(), _binaries_only():
        compiled: Any = torch.compile(type(function).forward, **choice)
        made = compiled.aot_compile(((function, *args), dict(kwargs)))
    info = made.source_info()
    sources = tuple(sorted({source.module for source in info.inlined_sources}))
    # Each of them holds the whole text of its file, only for messages.
    info.inlined_sources = {dataclasses.replace(s, content="") for s in info.inlined_sources}
    data = _saved(made, function)
    environment = made._artifacts.runtime_env
    imports = dict(environment.import_sources)
    around = type(function).forward.__globals__
    for name in environment.external_refs:
        if isinstance(module := around.get(name), ModuleType):
            imports[name] = module.__name__  # put there for this very code
    return Made(data, tuple(noted), sources, imports, made)


def _saved(made: Any, function: nn.Module) -> bytes:
    data: bytes = type(made).serialize(made, closed_over(function)).serialized_data
    return data


def closed_over(function: nn.Module) -> dict[str, Any]:
    """The functions and classes that a decorated forward closes over, by where they are found.

    They are part of the process, not of the program: it names them, and is given the live ones.
    """
    found: dict[str, Any] = {}

    def visit(name: str, thing: Any) -> None:
        if any(thing is known for known in found.values()):
            return
        found[name] = thing
        code = getattr(thing, "__code__", None)
        cells = zip(
            getattr(code, "co_freevars", ()),
            getattr(thing, "__closure__", None) or (),
            strict=False,
        )
        for variable, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not filled yet
            if isinstance(value, FunctionType | type):
                visit(f"{name}.{variable}", value)

    visit("forward", type(function).forward)
    del found["forward"]
    return found


def tuned(made: Made, loaded: Loaded, function: nn.Module) -> bytes:
    """The same function, each of its kernels in the one configuration that won where it has run.

    Else torch compiles a variant of some reductions, and times it against the first, in every process
    that loads them. So there is less to read, nothing to time, and one result on all devices.
    """
    serialize = getattr(made.function._artifacts.compiled_fn, "serialize", None)
    kernels = dict(loaded.kernels)
    for graph in _graphs(serialize()) if serialize is not None else ():
        bundle = getattr(graph, "_triton_bundle", None)
        if bundle is not None:
            graph._triton_bundle = _tuned_bundle(bundle, kernels)
    return _saved(made.function, function)


def _tuned_bundle(bundle: Any, kernels: Mapping[str, Any]) -> Any:
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    device = bundle.kernel_artifacts[0].device if bundle.kernel_artifacts else 0
    more: dict[str, Any] = {}
    for autotuner in bundle.static_autotuners:
        won = _winner(kernels.get(autotuner.cache_key), autotuner.kernel)
        if won is None:
            continue
        bundled = [
            r for r in autotuner.kernel.compile_results if _config(r.config) == _config(won.config)
        ]
        folder = triton_hash_to_path_key(won.kernel.hash)
        artifacts = None if bundled else _artifacts_of(folder, device)
        if not bundled and not artifacts:
            continue  # its binary is not where Triton keeps them
        if artifacts:
            more[folder] = artifacts
        autotuner.kernel.compile_results = bundled[:1] or [_unloaded(won)]
        autotuner.kernel.inductor_meta["dynamic_scale_rblock"] = False
    if not more:
        return bundle
    from torch._inductor.triton_bundler import TritonKernelArtifacts

    added = [TritonKernelArtifacts(folder, device, list(found)) for folder, found in more.items()]
    return dataclasses.replace(bundle, kernel_artifacts=[*bundle.kernel_artifacts, *added])


def _winner(live: Any, bundled: Any) -> Any:
    """The result that a kernel has settled on, of the kind that travels; None where there is none."""
    launchers: Sequence[Any] = getattr(live, "launchers", ())
    if len(launchers) != 1 or not hasattr(launchers[0], "config") or not bundled.compile_results:
        return None
    kind = type(bundled.compile_results[0])
    wanted = _config(launchers[0].config)
    found = [r for r in live.compile_results if _config(r.config) == wanted]
    return found[0] if len(found) == 1 and type(found[0]) is kind else None


def _unloaded(result: Any) -> Any:
    """A compiled configuration as it was before its binary was loaded."""
    plain = copy.copy(result)
    plain.kernel = copy.copy(result.kernel)
    plain.kernel.function = plain.kernel.cubin_path = plain.kernel.cubin_raw = None
    return plain


def _artifacts_of(folder: str, device: int) -> list[Any]:
    """The binaries in one of Triton's folders, as a bundle holds them."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.triton_bundler import TritonBundler, TritonKernelArtifact

    directory = Path(triton_cache_dir(device), folder)
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.endswith(BINARIES):
            payload = path.read_bytes()
            if path.name.endswith(".json"):
                payload = payload.replace(str(directory).encode(), TritonBundler._REPLACE_BYTES)
            found.append(TritonKernelArtifact(path.name, payload))
    return found if any(not path.filename.endswith(".json") for path in found) else []


def _config(config: Any) -> tuple[Any, ...]:
    """What tells the configurations of a kernel apart."""
    return (*sorted(config.kwargs.items()), config.num_warps, config.num_stages)


def _guarded(entry: Any) -> Guarded:
    created = getattr(entry.orig_guard.create_fn, "keywords", None) or {}
    missing_attribute = created.get("attr") if entry.guard_type.startswith("NOT_PRESENT") else None
    name = entry.orig_guard.name
    return Guarded(
        source=name() if callable(name) else name,
        value=entry.value if entry.has_value else None,
        has_value=bool(entry.has_value),
        not_in_dict=missing_attribute,
    )


BINARIES = (".cubin", ".json", ".hsaco", ".zebin", ".spv")
"""What launching a Triton kernel needs; the steps on the way to it are four times as large."""


@contextmanager
def _binaries_only() -> Iterator[None]:
    """Kernels are bundled without the intermediate code that Triton keeps beside them."""
    from torch._inductor.triton_bundler import TritonBundler

    collect = vars(TritonBundler)["collect"]

    def collecting(cls: type[TritonBundler]) -> Any:
        bundle, metadata = collect.__get__(None, cls)()
        kernels = [
            dataclasses.replace(
                kernel, artifacts=[a for a in kernel.artifacts if a.filename.endswith(BINARIES)]
            )
            for kernel in bundle.kernel_artifacts
        ]
        return dataclasses.replace(bundle, kernel_artifacts=kernels), metadata

    setattr(TritonBundler, "collect", classmethod(collecting))  # noqa: B010
    try:
        yield
    finally:
        setattr(TritonBundler, "collect", collect)  # noqa: B010


@contextmanager
def _one_rank() -> Iterator[None]:
    """Code that names no device index, in a torch that can generate it."""
    config: Any = getattr(torch.compiler, "config", None)
    if not hasattr(config, "compile_on_one_rank"):
        yield
        return
    with config.patch(compile_on_one_rank=True):
        yield


# -- loading --------------------------------------------------------------------------------


class _Moving(threading.local):
    ours = False
    indices: tuple[int, int] | None = None
    moved: int = 0
    left: tuple[str, ...] = ()
    kernels: tuple[tuple[str, Any], ...] = ()


_moving = _Moving()
_hooking = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program in this process."""

    call: Callable[..., Any]
    """Takes the module first, then what the module would be called with."""
    moved: int
    """Names of the old device index that were rewritten."""
    left: tuple[str, ...]
    """Lines that still name it; a program with any must not be used."""
    kernels: tuple[tuple[str, Any], ...] = ()
    """torch's key and object of every kernel that it launches itself."""


def load(
    data: bytes,
    function: nn.Module,
    imports: Mapping[str, str],
    indices: tuple[int, int] | None = None,
) -> Loaded:
    """Loads what ``make`` made of such a module; no tracing.

    ``imports``: as it was made; ``indices``: (compiled on, to be used on) of the GPU.

    Raises whatever torch raises for bytes that are not of its own making.
    """
    from torch._dynamo.aot_compile import AOTCompiledFunction

    _install()
    _moving.ours, _moving.indices, _moving.kernels = True, indices, ()
    _moving.moved, _moving.left = 0, ()
    try:
        around = dict(type(function).forward.__globals__)
        around |= {alias: importlib.import_module(name) for alias, name in imports.items()}
        loaded = AOTCompiledFunction.deserialize(data, around, closed_over(function))
        return Loaded(loaded.fn, _moving.moved, _moving.left, _moving.kernels)
    finally:
        _moving.ours, _moving.indices, _moving.kernels = False, None, ()


def _install() -> None:
    """Puts the rewriting where torch turns a bundled entry into a function; once a process."""
    from torch._dynamo import package
    from torch._functorch._aot_autograd import aot_autograd_result as results

    with _hooking:
        original = results.deserialize_bundled_cache_entry
        if getattr(original, "_compilecache", False):
            return

        def deserialize(entry: Any, *rest: Any, **named: Any) -> Any:
            if _moving.ours:
                # torch copies the whole entry, in case somebody wants to save it again.
                entry.__deepcopy__ = lambda memo: entry
                for graph in _graphs(entry):
                    _rebase(graph)
                    if _moving.indices is not None:
                        _move_graph(graph, *_moving.indices)
                    _moving.kernels += tuple(_launched(graph))
            return original(entry, *rest, **named)

        deserialize._compilecache = True  # type: ignore[attr-defined]
        results.deserialize_bundled_cache_entry = deserialize
        # No guard was kept: there is no tree of guards to build.
        package.load_guards_state = _unless_ours(package.load_guards_state)
        package.load_guard_manager = _unless_ours(package.load_guard_manager)


def _unless_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_other(*args: Any, **kwargs: Any) -> Any:
        return _NO_GUARDS if _moving.ours else original(*args, **kwargs)

    return load_other


_NO_GUARDS = object()


NAMING = (
    r"\bcuda:",
    r"\b_DeviceGuard\(",
    r"\bget_raw_stream\(",
    r"\bset_device\(",
    r"\bDeviceProperties\(type='cuda', index=",
    r"\btorch\.cuda\.device\(",
    r"\bstream_?guard\(",
    r"\bdevice\(type='cuda', index=",
    r"\bdevice\('cuda', ",
)
"""What generated code writes before a device index."""

_LEFT = (
    r"\bcuda:{old}\b|\b(?:\w*[dD]evice\w*|\w*[sS]tream\w*)\(\s*{old}\s*[,)]"
    r"|\bdevice(?:_idx|_index|_id)?\s*=\s*{old}\b|\bcuda'?\s*,\s*(?:index\s*=\s*)?{old}\b"
)
"""What would still name it."""


def rewritten(source: str, old: int, new: int) -> tuple[str, int, tuple[str, ...]]:
    """Generated code for another device index, how many names were changed, what is left over."""
    moved, count = re.subn(rf"({'|'.join(NAMING)}){old}\b", rf"\g<1>{new}", source)
    named = re.compile(_LEFT.format(old=old))
    if named.search(moved) is None:
        return moved, count, ()
    lines = (line.strip()[:160] for line in moved.splitlines() if named.search(line))
    return moved, count, tuple(lines)


def _graphs(entry: Any) -> Iterator[Any]:
    """Forward and backward of a bundled entry."""
    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None:
            yield part.result


def _launched(graph: Any) -> Iterator[tuple[str, Any]]:
    """Key and object of the kernels that come ready to be launched."""
    bundle = getattr(graph, "_triton_bundle", None)
    for autotuner in bundle.static_autotuners if bundle is not None else ():
        yield autotuner.cache_key, autotuner.kernel


def _rebase(graph: Any) -> None:
    """Lets kernels look for the winners of their tuning in this cache root, not the one of old."""
    for _, kernel in _launched(graph):
        if isinstance(name := getattr(kernel, "filename", None), str):
            kernel.filename = _in_root(name)
        tuned: Any = getattr(getattr(kernel, "save_cache_hook", None), "__self__", None)
        local = getattr(tuned, "local_cache", None)
        if isinstance(local, tuple) and len(local) == 2:
            tuned.local_cache = (local[0], _in_root(local[1]))


def _in_root(path: str) -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(Path(cache_dir(), *Path(path).parts[-2:]))


def _move_graph(graph: Any, old: int, new: int) -> None:
    before = graph.source_code
    after, count, left = rewritten(before, old, new)
    constants = getattr(graph, "constants", None) or {}
    left += tuple(
        f"constant {name} lies on {value.device}"
        for name, value in constants.items()
        if isinstance(value, Tensor) and value.device.type == "cuda"
    )
    _moving.moved += count
    _moving.left += left
    graph.source_code = after
    graph.device_idxs = type(graph.device_idxs)(new if i == old else i for i in graph.device_idxs)
    if count:
        graph.cache_key = f"{graph.cache_key}d{new}"
    bundle = getattr(graph, "_triton_bundle", None)
    if bundle is not None:
        graph._triton_bundle = _moved_bundle(bundle, _renamed_kernels(before, after), old, new)


def _moved_bundle(bundle: Any, keys: Mapping[str, str], old: int, new: int) -> Any:
    """Kernels for the other index: the binaries are the same, what launches them names it."""
    artifacts = [
        dataclasses.replace(kernel, device=new) if kernel.device == old else kernel
        for kernel in bundle.kernel_artifacts
    ]
    launched = []
    for autotuner in bundle.static_autotuners:
        _move_autotuner(autotuner.kernel, old, new)
        key = keys.get(autotuner.cache_key, autotuner.cache_key)
        launched.append(dataclasses.replace(autotuner, cache_key=key))
    return dataclasses.replace(bundle, kernel_artifacts=artifacts, static_autotuners=launched)


def _renamed_kernels(before: str, after: str) -> dict[str, str]:
    """torch's key of every Triton kernel in a generated source, before → after."""
    from torch._inductor.async_compile import CompiledTritonKernels

    pairs = zip(_kernel_sources(before), _kernel_sources(after), strict=True)
    return {CompiledTritonKernels.key(a): CompiledTritonKernels.key(b) for a, b in pairs}


_KERNEL = re.compile(r"async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL)


def _kernel_sources(source: str) -> list[str]:
    """The second argument of every ``async_compile.triton(name, source, …)``."""
    texts: list[str] = _KERNEL.findall(source)
    return [str(ast.literal_eval(f"'''{text}'''")) if "\\" in text else text for text in texts]


def _move_autotuner(kernel: Any, old: int, new: int) -> None:
    from torch._inductor.runtime.hints import DeviceProperties

    def moved(value: Any) -> Any:
        if isinstance(value, DeviceProperties) and value.index == old:
            return value._replace(index=new)
        return value

    kernel.device_props = moved(kernel.device_props)
    for meta in (kernel.triton_meta, *(result.compile_meta for result in kernel.compile_results)):
        for name, value in list(meta.items()):
            meta[name] = new if name == "device" and value == old else moved(value)


# -- the state of a thread --------------------------------------------------------------------


class State:
    """What torch's guards see of a thread: grad mode, autocast, default dtype, determinism, modes."""

    def __init__(self) -> None:
        from torch._C._dynamo.guards import GlobalStateGuard

        self._guard = GlobalStateGuard()
        self._modes = _modes()
        self.words = state_words()

    def same(self) -> bool:
        """Whether this thread's is the same now."""
        return bool(self._guard.check()) and _modes() == self._modes

    def differences(self) -> list[str]:
        """What differs, in words."""
        if self.same():
            return []
        now = state_words()
        changed = [f"{k} is {now[k]}, was {v}" for k, v in self.words.items() if now[k] != v]
        return changed or [f"torch's state differs ({self._guard.reason()})"]


def _modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def state_words() -> dict[str, str]:
    """The same for people, and for comparing with another process."""
    words = {
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "modes": str(_modes()),
    }
    for kind in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(kind)
        words[f"autocast {kind}"] = str(torch.get_autocast_dtype(kind)) if on else "off"
    return words


# -- modules --------------------------------------------------------------------------------


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dictionaries in which a module keeps its hooks."""
    return tuple(vars(module)[name] for name in HOOKS)


def global_hooks() -> tuple[dict[Any, Any], ...]:
    """Hooks that are registered for every module of the process."""
    from torch.nn.modules import module

    names = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    return tuple(getattr(module, name) for name in names)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is, or was made, a wrapper for distributed training."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
    return bool(names & wrappers)


def is_plain(tensor: Tensor) -> bool:
    """Whether a parameter or buffer is an ordinary tensor, whatever torch calls its class."""
    return type(tensor).__module__ == "torch.nn.parameter" and type(tensor).__name__ in (
        "Parameter",
        "Buffer",
    )


def import_first() -> None:
    """Imports what other threads might import too, torch's compiler; before ``import_ahead``."""
    for name in ("torch._dynamo", "torch._inductor.config"):
        importlib.import_module(name)


def import_ahead() -> None:
    """Imports what loading a program needs; meant for a thread beside other work."""
    names = [
        "torch._dynamo.aot_compile",
        "torch._functorch._aot_autograd.aot_autograd_result",
        "torch._inductor.output_code",
        "torch._inductor.codecache",
        "torch._inductor.async_compile",
        "torch._inductor.select_algorithm",
        "torch._inductor.compile_fx",
    ]
    if torch.cuda.is_available():
        names += ["torch._inductor.runtime.triton_heuristics", "triton"]
    for name in names:
        with suppress(ImportError, AttributeError):  # it is imported where it is needed, then
            importlib.import_module(name)
