"""Fills the generated parts of the documentation: help texts of commands, and example programs.

A generated part of a page lies between two marks::

    <!-- generated: help warm -->
    …
    <!-- end -->

``generated: figures RESULT:FIGURE,…;RESULT:…`` is a table of figures from ``benchmarks/results/``.
``python docs/generate.py`` writes every page anew; with ``--check`` it only says which are stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from compilecache.cli import group
from warmup.cli import group as warmup_group

ROOT = Path(__file__).parent.parent
WIDTH = 80

_PART = re.compile(
    r"^<!-- generated: (?P<kind>\w+)(?: (?P<name>\S+))? -->\n.*?^<!-- end -->$", re.DOTALL | re.M
)


def pages() -> Iterator[Path]:
    """Every page that may hold generated parts."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def refreshed(text: str) -> str:
    """The text of a page with its generated parts made anew. Raises ValueError for unknown ones."""
    return _PART.sub(_part, text)


def _part(match: re.Match[str]) -> str:
    kind, name = match["kind"], match["name"] or ""
    first = match[0].partition("\n")[0]
    if kind == "figures":
        return f"{first}\n{figures(name)}\n<!-- end -->"
    if kind == "help":
        content, language = help_text(name), "text"
    elif kind == "file":
        content, language = (ROOT / name).read_text(encoding="utf-8"), "python"
    else:
        raise ValueError(f"nothing generates '{kind}'")
    return f"{first}\n```{language}\n{content.rstrip()}\n```\n<!-- end -->"


def figures(name: str) -> str:
    """A table of figures from one or more results, each linked: it names machine and commit.

    A name that starts with "../" is that of a page one folder below.
    """
    above, name = ("../", name[3:]) if name.startswith("../") else ("", name)
    lines = ["| figure | value | against | ratio | result |", "|---|---|---|---|---|"]
    for part in name.split(";"):
        file, _, wanted = part.partition(":")
        path = f"benchmarks/results/{file}.json"
        link = f"{above}{path}"
        result = json.loads((ROOT / path).read_text(encoding="utf-8"))
        rows = {row["figure"]: row for row in result["rows"]}
        for row in (rows[figure] for figure in wanted.split(",")):
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}"
            value = f"{row['value']:.4g} {row['unit']}"
            cells = (f"`{row['figure']}`", value, row["against"] or "", ratio, f"[{file}]({link})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def help_text(name: str) -> str:
    """What ``compilecache NAME --help`` prints on 80 columns, for ``warmup.NAME`` that of warmup."""
    program, _, name = name.rpartition(".")
    commands = warmup_group if program == "warmup" else group
    parent = click.Context(commands, info_name=program or "compilecache", terminal_width=WIDTH)
    if not name:
        return commands.get_help(parent)
    command = commands.get_command(parent, name)
    if command is None:
        raise ValueError(f"there is no command '{name}'")
    context = click.Context(command, parent=parent, info_name=name, terminal_width=WIDTH)
    return command.get_help(context)


def main() -> int:
    """0 when every page is, or now is, current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when stale")
    check = parser.parse_args().check
    stale = [
        page for page in pages() if refreshed(page.read_text("utf-8")) != page.read_text("utf-8")
    ]
    for page in stale:
        print(f"{'stale' if check else 'wrote'} {page.relative_to(ROOT)}")
        if not check:
            page.write_text(refreshed(page.read_text("utf-8")), encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
