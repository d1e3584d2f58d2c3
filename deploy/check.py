# Checks the files of this folder with the tools that know their formats; needs no network. `make lint` runs it.
# When you have changed one of them: python deploy/check.py. What a tool cannot check is said, and is in tests/deploy.
"""Kubernetes schemas, hadolint, the schemas of GitHub and GitLab, shellcheck, systemd-analyze."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent
TOOLS = Path(sys.executable).parent

LEFT = {
    "PodMonitor": "its schema comes with the Prometheus Operator, not with Kubernetes",
    "Kustomization": "read by kustomize, never sent to a cluster",
    "Component": "read by kustomize, never sent to a cluster",
    "patch": "a part of a manifest",
    "data": "a file in a ConfigMap",
}
"""What the Kubernetes schemas do not know, and why."""

VERSIONS = ("1.33.0", "1.37.0")
"""The oldest and the newest Kubernetes that the manifests are for."""


def kind_of(path: Path) -> str:
    """The kind of a file below kubernetes/; "manifest" when Kubernetes has a schema for all in it."""
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    if isinstance(documents[0], list):
        return "patch"
    kinds = {document.get("kind", "data") for document in documents}
    return next((kind for kind in LEFT if kind in kinds), "manifest")


def checks() -> Iterator[tuple[str, list[str]]]:
    """A name and a command line for each check."""
    files = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
    manifests = [str(path) for path in files if kind_of(path) == "manifest"]
    for version in VERSIONS:
        validate = [tool("kubernetes-validate"), "--strict", "--quiet", "-k", version]
        yield f"manifests, Kubernetes {version}", [*validate, *manifests]
    yield "Dockerfiles", [tool("hadolint"), *found("image", "*Dockerfile")]
    schema = [tool("check-jsonschema"), "--builtin-schema"]
    yield "GitHub", [*schema, "vendor.github-workflows", *found("github", "*.yml")]
    yield "GitLab", [*schema, "vendor.gitlab-ci", *found("gitlab", "*.yml")]
    yield "Slurm", [tool("shellcheck"), *found("slurm", "*.sbatch")]


def tool(name: str) -> str:
    """Where this Python's environment has a tool."""
    path = shutil.which(name, path=str(TOOLS))
    if path is None:
        sys.exit(f"error: there is no '{name}' in {TOOLS}. Run: pip install '.[lint]'")
    return path


def found(folder: str, pattern: str) -> list[str]:
    """The files of a folder."""
    return [str(path) for path in sorted((DEPLOY / folder).glob(pattern))]


def scripts() -> Iterator[tuple[str, str]]:
    """The shell in the files of GitHub and GitLab, a name and a text for each."""
    for path in found("github", "*.yml"):
        jobs = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["jobs"]
        for step in (step for job in jobs.values() for step in job["steps"] if "run" in step):
            yield f"GitHub, step '{step['name']}'", re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
    for path in found("gitlab", "*.yml"):
        for name, job in yaml.safe_load(Path(path).read_text(encoding="utf-8")).items():
            if "script" in job:
                yield f"GitLab, job '{name}'", "\n".join(job["script"])


def run(name: str, command: list[str], text: str = "") -> bool:
    """Whether a check of files, or of a text, passes; what it has to say goes out as it is."""
    passed = subprocess.run(command, input=text, text=True).returncode == 0
    print(f"{name}: {'ok' if passed else 'FAILED'}")
    return passed


def check_unit(unit: Path) -> bool:
    """systemd's own check, of a copy that starts a program which exists here too."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        print("systemd: left out, there is no systemd-analyze here")
        return True
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, unit.name)
        text = unit.read_text(encoding="utf-8")
        copy.write_text(re.sub(r"^(ExecStart\w*)=\S+", r"\1=/bin/sh", text, flags=re.M))
        return run("systemd", [analyze, "verify", "--man=no", "--recursive-errors=no", str(copy)])


def main() -> int:
    """0 when all is well, else 1."""
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        if (kind := kind_of(path)) != "manifest":
            print(f"left out: {path.relative_to(DEPLOY)} ({kind}: {LEFT[kind]})")
    passed = [run(name, command) for name, command in checks()]
    bash = [tool("shellcheck"), "--shell=bash", "-"]
    passed += [run(name, bash, text) for name, text in scripts()]
    passed += [check_unit(Path(unit)) for unit in found("systemd", "*.service")]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
