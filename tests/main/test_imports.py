"""Who may import whom, and what starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import environment

import compilecache
from compilecache.cli import COMMANDS

PACKAGE = Path(compilecache.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

ONLY_IN = {
    "fsspec": {"storage.py"},
    "botocore": {"s3client.py"},
    "filelock": {"cachedir.py"},
    "cryptography": {"signing.py"},
    "xxhash": {"artifact.py", "pack.py", "programfile.py"},
}
"""Libraries that one side of the package keeps to itself."""

WITHOUT_TORCH = (
    "compilecache compilecache.artifact compilecache.baked compilecache.buckets compilecache.cachedir compilecache.claims "
    "compilecache.cli "
    "compilecache.errors compilecache.evidence compilecache.exchange compilecache.fingerprint "
    "compilecache.pack compilecache.picture.page compilecache.progress compilecache.proof compilecache.ranks "
    "compilecache.report compilecache.shapes compilecache.sharing compilecache.signing "
    "compilecache.sources compilecache.store "
    "compilecache.watch compilecache.workload "
    "warmup.cli warmup.client warmup.hosts warmup.muster warmup.oneshot warmup.service.worker warmup.service.server"
).split()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_keeps_to_its_own_side(path: Path) -> None:
    """Neither the service nor the model; and each library in its own corner."""
    tops = {name.partition(".")[0] for name in imported(path)}
    assert not tops & {"warmup", "dflash_model", "tests"}
    for library, homes in ONLY_IN.items():
        if library in tops:
            assert path.name in homes
    if "click" in tops:
        assert path.parent.name == "cli"
    if path.parent != PACKAGE / "cli" and path.name != "__main__.py":
        assert not any(name.startswith("compilecache.cli") for name in imported(path))


SERVICE = PACKAGE.parent / "warmup"
WEB = {"fastapi", "starlette", "uvicorn", "h11", "anyio", "prometheus_client"}


@pytest.mark.parametrize(
    "path", sorted(SERVICE.rglob("*.py")), ids=lambda path: str(path.relative_to(SERVICE))
)
def test_the_service_uses_only_public_names(path: Path) -> None:
    """No name of ``compilecache`` with an underscore; the web's libraries in ``service`` alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("compilecache"):
            private = [a.name for a in node.names if a.name.startswith("_")]
            assert private == []
            assert "._" not in str(node.module)
    tops = {name.partition(".")[0] for name in imported(path)}
    assert not tops & {"dflash_model", "tests"}
    if path.parent != SERVICE / "service":
        assert not tops & WEB
    if path.name != "raycluster.py":
        assert "ray" not in tops
    if "click" in tops:
        assert path.parent == SERVICE


CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""

HELP = """
import sys
from compilecache.cli import group
for name in sys.argv[1:]:
    try:
        group.main([*name.split(), "--help"], standalone_mode=False)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, name
"""


def python(program: str, *words: str) -> str:
    """Runs a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_does_not_import_torch() -> None:
    """Commands start at once, and tools may read plans and records without it."""
    python(CHECK, *WITHOUT_TORCH)


def test_the_help_of_every_command_needs_no_torch() -> None:
    """It names an example, too."""
    out = python(HELP, "", *COMMANDS)
    assert out.count("Usage:") == len(COMMANDS) + 1
    assert out.count("Example") >= len(COMMANDS)
    assert "Exit codes: 0 done" in out


def test_the_door() -> None:
    """Every public name can be had, in order, and nothing else is promised."""
    assert list(compilecache.__all__) == sorted(compilecache.__all__)
    for name in compilecache.__all__:
        assert getattr(compilecache, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compilecache.nothing  # noqa: B018
