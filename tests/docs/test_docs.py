"""The documentation is complete, current and true: names, links, and the code in it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import get_args

import click
import pytest
import yaml
from processes import ROOT, Template
from pydantic import BaseModel

import compilecache
from compilecache import cli, errors
from compilecache.artifact import FileEntry, PackInfo, Record
from compilecache.claims import Claim
from compilecache.cli import COMMANDS, group
from compilecache.engines.programfile import Header
from compilecache.evidence import Evidence, Outcome
from compilecache.fingerprint import ENV_IGNORED, ENV_PREFIXES, fingerprint
from compilecache.gpuprofile import GpuProfile
from compilecache.report import Report, Status, TargetReport
from compilecache.shapes import InputSpec, ShapePlan, TensorSpec
from compilecache.tags import Release, SourceFile, Surroundings, Tag, TaggedRecord
from compilecache.workload import Workload
from warmup.cli import group as warmup_group

DOCS = ROOT / "docs"
SOURCES = ("compilecache", "warmup", "dflash_model", "benchmarks", "examples")


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def pages() -> list[Path]:
    """Every page of the project."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def missing(names: object, text: str) -> list[str]:
    """Those names that a text does not have as code or in a help text."""
    assert isinstance(names, list | tuple | set | frozenset | dict)
    return [
        str(name)
        for name in names
        if not re.search(rf"(?<![\w-]){re.escape(str(name))}(?![\w-])", text)
    ]


def sources() -> Iterator[tuple[Path, str]]:
    """Every Python file of the product, the benchmarks and the examples."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """``docs/generate.py``."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- names ---------------------------------------------------------------------------------------


def test_generated_parts_are_current(generator: ModuleType) -> None:
    """Help texts and example programs in the pages are what the code says today."""
    for path in generator.pages():
        text = path.read_text(encoding="utf-8")
        assert generator.refreshed(text) == text, f"run: python docs/generate.py ({path.name})"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_commands_md(name: str) -> None:
    """Each command has a section of its own that shows all its options."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    section = page("commands.md").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    options = [text for p in command.params if isinstance(p, click.Option) for text in p.opts]
    assert options
    assert missing(options, section) == []


@pytest.mark.parametrize("name", sorted(warmup_group.commands))
def test_every_command_of_warmup_is_in_commands_md(name: str) -> None:
    """Each has a section of its own that shows all its options."""
    section = page("commands.md").partition(f"\n## warmup {name}\n")[2].partition("\n## ")[0]
    params = warmup_group.commands[name].params
    options = [text for p in params if isinstance(p, click.Option) for text in p.opts]
    assert options
    assert missing(options, section) == []


def test_every_exit_code_is_documented() -> None:
    """Each constant of the command line, and the two of signals, has a row in the table."""
    codes = [cli.DONE, cli.FAULT, cli.USAGE, cli.NOT_WARM, cli.DAMAGED, cli.TIMED_OUT, 130, 143]
    rows = re.findall(r"^\| (\d+) \|", page("commands.md"), re.M)
    assert [int(row) for row in rows] == codes


def all_errors() -> list[type[errors.CompileCacheError]]:
    """The base, its leaves, and those of the model package."""
    from dflash_model.checkpoint import CheckpointError

    base = errors.CompileCacheError
    named = [value for value in vars(errors).values() if inspect.isclass(value)]
    own = [kind for kind in named if issubclass(kind, base)]
    return [*own, CheckpointError]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_is_documented_with_its_exit_code_and_fields(
    kind: type[errors.CompileCacheError],
) -> None:
    """The table of errors has built-in, exit code and fields; every leaf has a paragraph too."""
    text = page("errors.md")
    row = re.search(rf"^\| `{kind.__name__}`.*$", text, re.M)
    assert row is not None
    _, _, builtin, code, more, _ = (cell.strip() for cell in row[0].split("|"))
    assert int(code) == cli.exit_code(kind.__new__(kind))
    bases = [
        base.__name__
        for base in kind.__bases__
        if base not in (errors.CompileCacheError, Exception)
    ]
    assert builtin == " ".join(f"`{name}`" for name in bases)
    own = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    base = kind is errors.CompileCacheError
    expected = [name for name in own if base or name not in ("problem", "next_step")]
    assert re.findall(r"`(\w+)`", more) == expected
    assert base or f"**{kind.__name__}**" in text


def test_every_error_in_the_table_of_exit_codes_belongs_there() -> None:
    """The codes of commands.md and the errors they name agree with the code."""
    for code, names in re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", page("commands.md"), re.M):
        for name in re.findall(r"`(\w+)`", names):
            kind = getattr(errors, name)
            assert cli.exit_code(kind.__new__(kind)) == int(code), name


def test_every_environment_variable_is_documented() -> None:
    """Whatever the sources read, set or compare with is in environment.md."""
    found = {*ENV_PREFIXES, *ENV_IGNORED}
    for _, text in sources():
        found |= set(
            re.findall(r"\b(?:COMPILECACHE|XDG|TORCHINDUCTOR|AWS|BENCH)_[A-Z_]*[A-Z]\b", text)
        )
        found |= set(re.findall(r"environ(?:\.get)?[\[(]\s*\"(\w+)\"", text))
    found |= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M))
    assert {"COMPILECACHE_ROOT", "COMPILECACHE_STORE", "COMPILECACHE_DEBUG", "VENV"} <= found
    assert missing(found, page("environment.md").replace("`TRITON_`", "TRITON_")) == []


FIELDS: list[tuple[str, type[BaseModel]]] = [
    ("plan-file.md", ShapePlan),
    ("plan-file.md", InputSpec),
    ("plan-file.md", TensorSpec),
    ("formats.md", Record),
    ("formats.md", Claim),
    ("formats.md", Header),
    ("formats.md", GpuProfile),
    ("formats.md", Tag),
    ("formats.md", Release),
    ("formats.md", Surroundings),
    ("formats.md", SourceFile),
    ("formats.md", TaggedRecord),
    ("library.md", Report),
    ("library.md", TargetReport),
    ("library.md", Evidence),
]


@pytest.mark.parametrize(
    ("name", "model"), FIELDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_field_is_documented(name: str, model: type[BaseModel]) -> None:
    """Plan, record, report and evidence: each field stands as code in a table of its page."""
    rows = " ".join(re.findall(r"^\|([^|]*)\|", page(name), re.M))
    assert missing({f"`{field}`" for field in model.model_fields}, rows) == []


def test_every_field_of_files_and_packs_is_documented() -> None:
    """What a record says of each file, and of its pack."""
    names = {field.name for kind in (FileEntry, PackInfo) for field in fields(kind)}
    assert missing({f"`{name}`" for name in names}, page("formats.md")) == []


def test_every_status_and_outcome_is_documented() -> None:
    """The words that reports use are explained."""
    words = [f"`{word}`" for word in (*get_args(Status), *get_args(Outcome))]
    assert missing(words, page("library.md")) == []


def test_every_argument_of_ensure_warm_is_documented() -> None:
    """Each has a row with its default."""
    for name, parameter in inspect.signature(compilecache.ensure_warm).parameters.items():
        row = re.search(rf"^\| `{name}` \|([^|]*)\|", page("library.md"), re.M)
        assert row is not None, name
        has_none = parameter.default is inspect.Parameter.empty
        assert row[1].strip() == ("" if has_none else f"`{parameter.default}`"), name


def test_every_method_of_a_workload_is_documented() -> None:
    """Each has a row that starts with its name."""
    methods = [name for name, value in vars(Workload).items() if inspect.isfunction(value)]
    rows = re.findall(r"^\| `(\w+)\(", page("library.md"), re.M)
    assert set(rows) == {name for name in methods if not name.startswith("_")}


def test_every_public_name_is_documented() -> None:
    """What can be imported from compilecache is named in the library's or the errors' page."""
    assert missing(compilecache.__all__, page("library.md") + page("errors.md")) == []


def test_every_component_of_a_fingerprint_is_documented() -> None:
    """The table has every label that a fingerprint has, on a CPU and on a GPU."""
    import torch

    from compilecache.examples import ExampleWorkload

    mark = fingerprint(ExampleWorkload(), torch.nn.Linear(2, 2), torch.device("cpu"))
    labels = {re.sub(r"^(env|inductor|source)\..*", r"\1.<", name) for name in mark.components}
    cells = re.findall(r"^\| (`.*?`) \|", page("formats.md"), re.M)
    assert [
        name for name in (labels | {"gpu", "driver"}) if not any(f"`{name}" in c for c in cells)
    ] == []


def test_presets_and_settings_of_the_drafter_are_documented() -> None:
    """Each preset with its layers and hidden size, each setting with its default."""
    from dflash_model import PRESETS
    from dflash_model.workload import dflash

    text = page("dflash.md")
    for name, config in PRESETS.items():
        row = re.search(rf"^\| `{re.escape(name)}` \|.*$", text, re.M)
        assert row is not None, name
        ids = ", ".join(map(str, config.target_layer_ids))
        heads = f"{config.num_heads} / {config.num_kv_heads} / {config.head_dim}"
        assert row[0].endswith(f"| {config.hidden_size} | {heads} | {ids} | {config.max_length} |")
    assert missing({f"`{name}`" for name in inspect.signature(dflash).parameters}, text) == []


def documented_cases() -> list[tuple[str, ...]]:
    """The cells of every row of cases.md: failures, what happened, what is done, tests."""
    rows = [line.strip("| ").split(" | ") for line in page("cases.md").splitlines()]
    return [tuple(cells) for cells in rows if len(cells) == 4 and cells[0].startswith("`")]


def docstring_of(place: str) -> str:
    """What a test promises; fails when there is no such test."""
    path, *names = place.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for name in names:
        found = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name
        ]
        assert len(found) == 1, place
        body = found[0].body
    return ast.get_docstring(found[0]) or ""


def test_every_public_failure_has_the_tests_that_are_named() -> None:
    """Each test of cases.md exists; each failure is named in the docstring of one of its tests."""
    cases = documented_cases()
    assert len(cases) > 50
    for failures, _, _, tests in cases:
        said = " ".join(docstring_of(place) for place in re.findall(r"`([^`]+)`", tests))
        for failure in re.findall(r"`([^`]+)`", failures):
            assert failure.rpartition("#")[2] in said, failure


# -- links and words -----------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file or folder of the project, every anchor a heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    """Nobody has to search for a page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    unlinked = [p.name for p in DOCS.glob("*.md") if f"(docs/{p.name}" not in text]
    assert unlinked == []
    numbers = [p.name[:3] for p in sorted((DOCS / "decisions").glob("*.md"))]
    assert numbers == [f"{n:03}" for n in range(1, len(numbers) + 1)]


def project_files() -> list[Path]:
    """Every file that belongs to the project, committed or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_file_has_left_over_notes_or_paths_of_a_machine() -> None:
    """No note of something still to be done, no path of a workplace."""
    words = re.compile(rb"\bTO" rb"DO\b|\bFIX" rb"ME\b|/wo" rb"rk/|\.\./sh" rb"ared")
    found = [str(path) for path in project_files() if words.search(path.read_bytes())]
    assert found == []


def test_the_readme_is_short_and_fits_a_terminal() -> None:
    """150 lines, and what a terminal shows in 80 columns."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 165
    for block in blocks(ROOT / "README.md"):
        if block.language == "console":
            assert max(map(len, block.code.splitlines())) <= 80


def test_figures_of_benchmarks_in_the_readme_are_in_the_results() -> None:
    """A figure that the README names in code has a row in benchmarks/results/."""
    results = [json.loads(p.read_text()) for p in (ROOT / "benchmarks/results").glob("*.json")]
    known = {row["figure"] for result in results for row in result["rows"]}
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("What is proven")[2]
    named = set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){2,})`", text)) - {"compiles_after_prime"}
    assert named <= known


# -- code ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    mark: str | None
    """"" to run it, "slow" if it compiles, None to leave it."""
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a page, with the mark before it."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(
        r"(?:^<!-- run(?:: (\w+))? -->\n)?^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.M
    )
    return [
        Block(
            path.name,
            text[: match.start()].count("\n") + 1,
            match[2],
            (match[1] or "") if match[0].startswith("<!--") else None,
            match[3],
        )
        for match in found
    ]


ALL = [block for path in pages() for block in blocks(path)]


def runnable(language: str) -> list[object]:
    """Marked blocks of a language, as parameters of a test."""
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.slow] if block.mark == "slow" else [])
        for block in ALL
        if block.mark is not None and block.language == language
    ]


def run_file(fresh: Template, path: Path, folder: Path) -> str:
    """Runs a program in a fresh process with a root and a store of its own; what it printed."""
    code = f"from runpy import run_path\nrun_path({str(path)!r}, run_name='__main__')"
    places = {f"COMPILECACHE_{name}": str(folder / name.lower()) for name in ("ROOT", "STORE")}
    ended = fresh.start(exec, code, env=places, cwd=folder).wait()
    assert ended.code == 0, ended.err
    return ended.out


@pytest.mark.parametrize("block", runnable("python"))
def test_marked_python_runs(block: Block, fresh: Template, tmp_path: Path) -> None:
    """The code of a page does what the page says: its assertions hold."""
    path = tmp_path / "page_code.py"
    path.write_text(block.code)
    run_file(fresh, path, tmp_path)


@pytest.mark.parametrize("block", [*runnable("sh"), *runnable("console")])
def test_marked_commands_run_and_print_what_the_page_shows(
    block: Block, fresh: Template, tmp_path: Path
) -> None:
    """Each command ends well; where the page shows its output, that is what it prints."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    joined = block.code.replace("\\\n", " ")
    lines = joined.splitlines()
    commands = lines if block.language == "sh" else [li[2:] for li in lines if li.startswith("$ ")]
    for line in commands:
        words = shlex.split(line, comments=True)
        assert words[0] == "compilecache"
        ended = fresh.command(*words[1:], cwd=tmp_path, env={"COLUMNS": "80"})
        assert ended.code == 0, ended.err
        shown = [li.rstrip() for li in lines if not li.startswith("$ ")]
        if block.language == "console":
            printed = [li.rstrip() for li in (ended.out + ended.err).splitlines()]
            assert printed == shown


def test_plans_in_the_pages_are_plans() -> None:
    """Every plan that a page shows is read without complaint; those of the drafter fit it."""
    from compilecache.workload import workload_of_plan

    shown = [b for b in ALL if b.language == "yaml" and b.code.startswith("format:")]
    assert len(shown) >= 3
    for block in shown:
        plan = ShapePlan.parse(yaml.safe_load(block.code), source=str(block))
        workload = workload_of_plan(plan)
        for spec in plan.specs:
            workload.check(spec)


def test_the_record_in_formats_md_is_a_record() -> None:
    """The example of a record is read without complaint, its key included."""
    (shown,) = [b for b in ALL if b.page == "formats.md" and b.language == "json"]
    assert Record.parse(shown.code.encode()).generation == 1


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=str)
def test_all_python_is_python(block: Block) -> None:
    """Blocks that are not run can at least be compiled."""
    compile(block.code, str(block), "exec")


def test_options_in_commands_of_the_pages_exist() -> None:
    """Every ``compilecache COMMAND --option`` in a page names what there is."""
    context = click.Context(group)
    lines = [
        line.removeprefix("$ ")
        for block in ALL
        if block.language in ("sh", "console")
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    used = [
        shlex.split(li, comments=True)
        for li in lines
        if li.removeprefix("$ ").startswith("compilecache ")
    ]
    assert len(used) > 8
    for _, name, *words in used:
        command = group.get_command(context, name)
        assert command is not None, name
        known = {text for p in command.params for text in (*p.opts, *p.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        assert [word for word in own if word.startswith("--") and word not in known] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["any_model_conv", "any_model_hf"])
def test_the_any_model_examples_compile_nothing_while_training(
    name: str, fresh: Template, tmp_path: Path
) -> None:
    """Both warm with one call, train, and every step finds its code."""
    if name == "any_model_hf":
        pytest.importorskip("transformers")
    out = run_file(fresh, ROOT / "examples" / f"{name}.py", tmp_path)
    assert "2 targets: 2 compiled" in out
    assert out.endswith("compiles while training: 0\n")
