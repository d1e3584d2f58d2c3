"""Reads the files of deploy/: manifests, patches, and the command lines in all of them."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from processes import ROOT

DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes/base"
OVERLAY = DEPLOY / "kubernetes/overlays/production"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc")
DOCKERFILES = [path for path in FILES if path.name.endswith("Dockerfile")]
YAML = [path for path in FILES if path.suffix in (".yaml", ".yml")]

SERVE = ("Deployment", "warmup")

Node = Any
"""What YAML holds."""


def named(path: Path) -> str:
    """A file's path below deploy/."""
    return str(path.relative_to(DEPLOY))


def read(path: Path) -> list[Node]:
    """Every document of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def manifests() -> Iterator[Node]:
    """Every complete manifest below kubernetes/, before patches."""
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        yield from (doc for doc in read(path) if "metadata" in doc and "kind" in doc)


def manifest(kind: str, name: str) -> Node:
    """The one of a kind and name."""
    (one,) = (m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return one


def pods(given: list[Node]) -> list[Node]:
    """The templates of those manifests that start pods."""
    return [m["spec"]["template"] for m in given if "template" in m.get("spec", {})]


def containers(pod: Node) -> list[Node]:
    """All of a pod's containers, those that start it included."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def patched() -> list[Node]:
    """Every manifest as the overlay changes it. Raises KeyError for a patch of what is not there."""
    made = copy.deepcopy(list(manifests()))
    for patch in read(OVERLAY / "kustomization.yaml")[0]["patches"]:
        kind, name = patch["target"]["kind"], patch["target"].get("name", ".*")
        hit = [
            m
            for m in made
            if re.fullmatch(kind, m["kind"]) and re.fullmatch(name, m["metadata"]["name"])
        ]
        if not hit:
            raise KeyError(f"{patch['path']} changes nothing")
        for one in hit:
            for change in read(OVERLAY / patch["path"])[0]:
                _apply(one, change)
    return made


def _apply(node: Node, change: Node) -> None:
    """One ``add`` or ``replace`` of RFC 6902."""
    *above, last = change["path"].strip("/").split("/")
    for step in above:
        node = node[int(step) if isinstance(node, list) else step]
    key = int(last) if isinstance(node, list) and last != "-" else last
    if change["op"] == "replace":
        node[key]  # what is replaced must be there
        node[key] = change["value"]
    elif key == "-":
        node.append(change["value"])
    else:
        node[key] = change["value"]


# -- command lines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One call of ``warmup`` or ``compilecache``."""

    file: str
    program: str
    words: tuple[str, ...]
    """The command and its arguments."""

    def __str__(self) -> str:
        return f"{self.file}: {self.program} {self.words[0]}"


_CALL = re.compile(r"(?:^|[\s;&|(=]|/bin/)(warmup|compilecache) +(?=[a-z])(.*)")
_ENDS = frozenset({"|", "||", "&", "&&", ";", ")", ">", ">>"})


def command_lines() -> list[Line]:
    """Every one in deploy/ and in its page."""
    return [
        Line(path.name, program, words)
        for path in (*FILES, ROOT / "docs/deploy.md")
        for text in _texts(path)
        for program, words in _calls(text)
    ]


def _texts(path: Path) -> Iterator[str]:
    if path in YAML:
        for document in read(path):
            yield from _strings(document)
    elif path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        yield text
        yield from (
            shlex.join(json.loads(found)) for found in re.findall(r"^CMD (.+)$", text, re.M)
        )
    elif path.suffix == ".md":
        yield from re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.DOTALL | re.M)
    elif path.suffix not in (".json", ".py"):
        yield path.read_text(encoding="utf-8")


def _strings(node: Node) -> Iterator[str]:
    if isinstance(node, dict):
        words = [*node.get("command", []), *node.get("args", [])]
        if "image" in node and words[:1] == ["warmup"]:
            yield shlex.join(words)
        for inner in node.values():
            yield from _strings(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _strings(inner)
    elif isinstance(node, str):
        yield node


def _calls(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in text.replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("#") and (match := _CALL.search(line)):
            yield match[1], tuple(_until_the_end(match[2]))


def _until_the_end(text: str) -> Iterator[str]:
    """The words of one command, as a shell reads them."""
    # A workflow's ${{ … }} is one word.
    words = shlex.shlex(re.sub(r"\$\{\{.*?\}\}", "1", text), posix=True, punctuation_chars=True)
    words.wordchars += "$%:{},@+"
    for word in words:
        if word in _ENDS:
            return
        yield word
