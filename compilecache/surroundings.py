"""What this process runs in, beyond what a fingerprint says: packages, variables, sources, settings.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from compilecache.documents import read_json
from compilecache.fingerprint import ENV_IGNORED, Fingerprint
from compilecache.sources import file_digest, source_file
from compilecache.tags import ADDRESS, PACKAGE, VARIABLE, VERSION, SourceFile, Surroundings

PREFIXES = (
    *("TORCH", "TRITON_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_TF32"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_"),
)
"""Environment variables that change what is compiled, or how fast it runs, begin so."""
PLACES = re.compile(r"_(DIR|PATH|HOME|FILE|ADDR|HOST|IFNAME|ID|BASE)$")
"""Those that only name a place, a host or a job end so."""
GIT_SECONDS = 20.0


def surroundings(mark: Fingerprint) -> Surroundings:
    """Of this process, with the modules that a fingerprint says are traced. Imports torch."""
    packages, origins = _distributions()
    return Surroundings(
        python=platform.python_version(),
        packages=packages,
        origins=origins,
        variables=variables(os.environ),
        settings=_settings(),
        gpus=_gpus(),
        sources=tuple(source(name) for name in traced_modules(mark)),
    )


def traced_modules(mark: Fingerprint) -> list[str]:
    """The Python modules whose sources are part of a fingerprint."""
    return [name.partition(".")[2] for name in mark.components if name.startswith("source.")]


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that matter, by name; what a launcher sets for each job is none."""
    return {
        name: value
        for name, value in sorted(given.items())
        if name.startswith(PREFIXES)
        and not (name.startswith("TORCHELASTIC") or name in ENV_IGNORED or PLACES.search(name))
        and re.match(VARIABLE, name)
    }


def normalized(name: str) -> str:
    """A distribution's name as the package index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of what is installed, the first on the path; and addresses, where it came from one."""
    packages: dict[str, str] = {}
    origins: dict[str, str] = {}
    for one in metadata.distributions():
        name = normalized(one.metadata["Name"] or "")
        known = re.match(PACKAGE, name) and re.match(VERSION, one.version or "")
        if not known or name in packages:
            continue
        packages[name] = one.version
        origin = _origin(one.read_text("direct_url.json"))
        if re.match(ADDRESS, origin):
            origins[name] = origin
    return dict(sorted(packages.items())), origins


def _origin(text: str | None) -> str:
    """The address of a distribution, as a requirement names it; "" for one of an index (PEP 610)."""
    try:
        data = read_json(text or "{}")
        if not isinstance(data, dict):
            return ""
        url = str(data.get("url", ""))
        url = re.sub(r"//[^/@]*@", "//", url)  # whoever may read a store need not see a token
        if "vcs_info" in data:
            return f"{data['vcs_info']['vcs']}+{url}@{data['vcs_info']['commit_id']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return url


def _settings() -> dict[str, str]:
    from compilecache import torch_names
    from compilecache.doctor.settings import SETTINGS

    found = ((s, torch_names.setting(s.module, s.name)) for s in SETTINGS)
    return {f"{s.module}.{s.name}": str(value) for s, value in found if value is not None}


def _gpus() -> tuple[str, ...]:
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


# -- sources ------------------------------------------------------------------------------------


def source(module: str) -> SourceFile:
    """A module as it lies here, and the commit that holds it, where git knows one."""
    try:
        digest, path = file_digest(module), source_file(module)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return SourceFile(module=module, digest=f"cannot be read: {error}")
    place = None if path is None else work_tree(path)
    if path is None or place is None:
        return SourceFile(module=module, digest=digest)
    root, commit = place
    relative = path.resolve().relative_to(root).as_posix()
    status = git(root, "status", "--porcelain", "--ignored", "--", relative)
    return SourceFile(
        module=module, digest=digest, path=relative, commit=commit, changed=status != ""
    )


def work_tree(path: Path) -> tuple[Path, str] | None:
    """The git work tree that a file lies in, and its commit; None without one, or without git."""
    folder = path.resolve().parent
    root = git(folder, "rev-parse", "--show-toplevel")
    commit = git(folder, "rev-parse", "--verify", "HEAD") if root else None
    return (Path(root).resolve(), commit) if root and commit else None


def git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None when it fails, or is not there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
