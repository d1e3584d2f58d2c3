"""Every private name of torch about the Triton kernels that a compiled graph carries, each behind a probe.

A graph's bundle holds the binaries of its kernels, and the objects that launch them. ``missing()`` lists
what this torch does not have.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compilecache.rewriting import kernel_sources
from compilecache.torch_names import absent

_PLACES = {
    "torch._inductor.async_compile": ["CompiledTritonKernels.key"],
    "torch._inductor.codecache": ["PyCodeCache.modules"],
    "torch._inductor.codegen.triton": ["get_fused_kernel_name"],
    "torch._inductor.runtime.cache_dir_utils": ["cache_dir", "triton_cache_dir"],
    "torch._inductor.runtime.hints": ["DeviceProperties"],
    "torch._inductor.runtime.runtime_utils": ["triton_hash_to_path_key"],
    "torch._inductor.triton_bundler": [
        "TritonBundler.collect",
        "TritonBundler._REPLACE_BYTES",
        "TritonKernelArtifact",
        "TritonKernelArtifacts",
    ],
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


def launched(graph: Any) -> Iterator[tuple[str, Any]]:
    """Key and object of the kernels that come ready to be launched."""
    bundle = getattr(graph, "_triton_bundle", None)
    for autotuner in bundle.static_autotuners if bundle is not None else ():
        yield autotuner.cache_key, autotuner.kernel


def built(graph: Any) -> Iterator[tuple[str, Any]]:
    """Name and object of the kernels that a loaded graph's code has built from their sources.

    torch bundles only those that its own launcher takes.
    """
    from torch._inductor.codecache import PyCodeCache

    key, ready = graph.cache_key, [kernel for _, kernel in launched(graph)]
    of_graph = (m for m in reversed(PyCodeCache.modules) if getattr(m, "key", None) == key)
    for name, thing in vars(next(of_graph, object)).items():
        if hasattr(thing, "launchers") and not any(thing is kernel for kernel in ready):
            yield name, thing


# -- how they are named ---------------------------------------------------------------------


LONGEST_NAME = 120
"""Letters of a kernel's name that say what is fused in it; its kind and its number come on top.

Triton cuts names of files at 150. torch looks for a binary by the whole name, does not find it, and
so bundles no kernel of a longer one: each start would time its configurations, and build a launcher
for it with gcc.
"""


@contextmanager
def short_names() -> Iterator[None]:
    """Kernels are given names of which Triton makes names of files without cutting them."""
    triton: Any = importlib.import_module("torch._inductor.codegen.triton")
    original = triton.get_fused_kernel_name

    def shortened(*args: Any) -> str:
        name: str = original(*args)
        return name[:LONGEST_NAME]

    triton.get_fused_kernel_name = shortened
    try:
        yield
    finally:
        triton.get_fused_kernel_name = original


# -- what is bundled ------------------------------------------------------------------------


BINARIES = (".cubin", ".json", ".hsaco", ".zebin", ".spv")
"""What launching a Triton kernel needs; the steps on the way to it are four times as large."""


@contextmanager
def binaries_only() -> Iterator[None]:
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


# -- what was tuned -------------------------------------------------------------------------


def tune(graph: Any, kernels: Iterable[tuple[str, Any]]) -> list[str]:
    """Leaves each of a graph's kernels in the one configuration that won where it has run.

    ``kernels``: torch's key of a kernel and its object in this process; of one kernel in several graphs
    there are several. Returns what stays as it was, in words: torch tunes it wherever it is loaded.
    """
    return _choose(graph, kernels, _winner)


def complete(graph: Any, kernels: Iterable[tuple[str, Any]]) -> list[str]:
    """Gives each of a graph's kernels all configurations that can be launched, as they are loaded here.

    So torch compiles no variant of a reduction wherever it is loaded. Returns what stays as it was.
    """
    return _choose(graph, kernels, _launchable)


Choice = Callable[[Sequence[Any], Any], tuple[list[Any], str]]
"""From the live objects of a kernel and the bundled one: compiled configurations, or none and why."""


def _choose(graph: Any, kernels: Iterable[tuple[str, Any]], choice: Choice) -> list[str]:
    bundle = getattr(graph, "_triton_bundle", None)
    if bundle is None:
        return []
    graph._triton_bundle, untuned = chosen_bundle(bundle, kernels, choice)
    return untuned


def tuned_bundle(bundle: Any, kernels: Iterable[tuple[str, Any]]) -> tuple[Any, list[str]]:
    """A bundle of the winners, with the binaries of those that torch compiled after it."""
    return chosen_bundle(bundle, kernels, _winner)


def chosen_bundle(
    bundle: Any, kernels: Iterable[tuple[str, Any]], choice: Choice
) -> tuple[Any, list[str]]:
    """A bundle of the configurations that ``choice`` takes, with the binaries of new ones."""
    live: dict[str, list[Any]] = {}
    for key, kernel in kernels:
        live.setdefault(key, []).append(kernel)
    device = bundle.kernel_artifacts[0].device if bundle.kernel_artifacts else 0
    more: dict[str, Any] = {}
    untuned: list[str] = []
    for autotuner in bundle.static_autotuners:
        found, why = choice(live.get(autotuner.cache_key, []), autotuner.kernel)
        results, added = _to_bundle(found, autotuner.kernel, device)
        if len(results) < len(found):
            why = "Triton keeps no binary of it"
        if why:
            untuned.append(f"{autotuner.kernel_name}: {why}")
            continue
        more |= added
        autotuner.kernel.compile_results = results
        autotuner.kernel.inductor_meta["dynamic_scale_rblock"] = False
    if not more:
        return bundle, untuned
    from torch._inductor.triton_bundler import TritonKernelArtifacts

    new = [TritonKernelArtifacts(folder, device, list(files)) for folder, files in more.items()]
    return dataclasses.replace(bundle, kernel_artifacts=[*bundle.kernel_artifacts, *new]), untuned


def _to_bundle(
    found: Sequence[Any], kernel: Any, device: int
) -> tuple[list[Any], dict[str, list[Any]]]:
    """Compiled configurations as a bundle holds them, and the binaries that it has not yet."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    bundled = {_config(result.config): result for result in kernel.compile_results}
    results: list[Any] = []
    more: dict[str, list[Any]] = {}
    for result in found:
        if (known := bundled.get(_config(result.config))) is not None:
            results.append(known)
            continue
        folder = triton_hash_to_path_key(result.kernel.hash)
        if artifacts := _artifacts_of(folder, device):
            more[folder] = artifacts
            results.append(_unloaded(result))
    return results, more


def _winner(live: Sequence[Any], bundled: Any) -> tuple[list[Any], str]:
    """The result that a kernel has settled on, of the kind that travels; else none and why not."""
    settled = [kernel for kernel in live if len(getattr(kernel, "launchers", ())) == 1]
    if not settled:
        counts = [len(getattr(kernel, "launchers", ())) for kernel in live]
        return [], f"it has not run (launchers: {counts})"
    return _launched_by(settled[0], settled[0].launchers, bundled)


def _launchable(live: Sequence[Any], bundled: Any) -> tuple[list[Any], str]:
    """All results of a kernel that have a launcher."""
    if not live:
        return [], "it was not loaded"
    return _launched_by(live[0], live[0].launchers, bundled)


def _launched_by(kernel: Any, launchers: Sequence[Any], bundled: Any) -> tuple[list[Any], str]:
    """The results that these launchers stand for."""
    if not all(hasattr(one, "config") for one in launchers) or not bundled.compile_results:
        return [], "it has no configurations to choose from"
    kind, wanted = type(bundled.compile_results[0]), [_config(one.config) for one in launchers]
    found = [result for result in kernel.compile_results if _config(result.config) in wanted]
    if len(found) != len(wanted) or any(type(result) is not kind for result in found):
        kinds = [type(result).__name__ for result in found]
        return [], f"what is left is no {kind.__name__} ({kinds or 'and not among its results'})"
    return found, ""


def winner(kernel: Any) -> str | None:
    """Which of several configurations a kernel has settled on, in words; None where it is unsure."""
    if len(kernel.launchers) != 1 or not hasattr(kernel.launchers[0], "config"):
        return None
    return str(_config(kernel.launchers[0].config))


def settle(kernel: Any, won: str) -> None:
    """Leaves a kernel with the configuration of ``winner``, unless it has none such."""
    found = [k for k in kernel.launchers if str(_config(getattr(k, "config", None))) == won]
    if len(kernel.launchers) > 1 and found:
        kernel.launchers = found[:1]


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
    if config is None:
        return ()
    return (*sorted(config.kwargs.items()), config.num_warps, config.num_stages)


# -- where it is used -----------------------------------------------------------------------


def rebase(graph: Any) -> None:
    """Lets kernels look for the winners of their tuning in this cache root, not the one of old."""
    for _, kernel in launched(graph):
        if isinstance(name := getattr(kernel, "filename", None), str):
            kernel.filename = _in_root(name)
        tuned: Any = getattr(getattr(kernel, "save_cache_hook", None), "__self__", None)
        local = getattr(tuned, "local_cache", None)
        if isinstance(local, tuple) and len(local) == 2:
            tuned.local_cache = (local[0], _in_root(local[1]))


def _in_root(path: str) -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(Path(cache_dir(), *Path(path).parts[-2:]))


def move(graph: Any, before: str, after: str, indices: tuple[int, int]) -> None:
    """Lets a graph's kernels run on another device index.

    ``before``, ``after``: its generated code; ``indices``: (compiled on, to be used on).
    """
    bundle = getattr(graph, "_triton_bundle", None)
    if bundle is not None:
        graph._triton_bundle = moved_bundle(bundle, renamed_kernels(before, after), *indices)


def moved_bundle(bundle: Any, keys: Mapping[str, str], old: int, new: int) -> Any:
    """Kernels for the other index: the binaries are the same, what launches them names it."""
    artifacts = [
        dataclasses.replace(kernel, device=new) if kernel.device == old else kernel
        for kernel in bundle.kernel_artifacts
    ]
    autotuners = []
    for autotuner in bundle.static_autotuners:
        _move_autotuner(autotuner.kernel, old, new)
        key = keys.get(autotuner.cache_key, autotuner.cache_key)
        autotuners.append(dataclasses.replace(autotuner, cache_key=key))
    return dataclasses.replace(bundle, kernel_artifacts=artifacts, static_autotuners=autotuners)


def renamed_kernels(before: str, after: str) -> dict[str, str]:
    """torch's key of every Triton kernel in a generated source, before → after."""
    from torch._inductor.async_compile import CompiledTritonKernels

    pairs = zip(kernel_sources(before), kernel_sources(after), strict=True)
    return {CompiledTritonKernels.key(a): CompiledTritonKernels.key(b) for a, b in pairs}


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
