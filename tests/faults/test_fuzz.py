"""Parsers given what nobody would write; ``benchmarks/fuzz.py`` gives them a hundred thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import fuzz
from parsers import PARSERS

from compilecache.artifact import FileEntry, is_key
from compilecache.documents import MOST_DEPTH, read_json, read_yaml
from compilecache.errors import PlanError, UnsafePath
from compilecache.shapes import InputSpec, ShapePlan

INPUTS = {
    "record": 1200,
    "plan": 250,
    "pack": 900,
    "claim": 250,
    "tag": 300,
    "key": 400,
    "fingerprint": 600,
}


@pytest.mark.parametrize("name", PARSERS)
def test_broken_input_is_read_or_refused_and_nothing_else(name: str) -> None:
    """Errors of ours only, nothing left behind, nothing outside of the folder, in bounded time."""
    tally = fuzz(name, 7, range(INPUTS[name]))
    assert tally.crashes == []
    assert tally.inputs == INPUTS[name]
    assert tally.accepted >= 1
    assert name == "claim" or tally.refused > tally.inputs // 3


def load(tmp_path: Path, line: str) -> ShapePlan:
    """A plan file with this line in it."""
    path = tmp_path / "plan.yaml"
    path.write_text(f"format: 1\n{line}\nspecs: [{{dims: {{batch: 2}}}}]\n")
    return ShapePlan.load(path)


BOMB = "lengths: {a0: &a0 [x], " + ", ".join(
    f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}, *a{n}, *a{n}, *a{n}, *a{n}]"
    for n in range(9)
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (BOMB + "}", "aliases make more than"),
        ("settings: &a {b: *a}", "inside of what it names"),
        ("settings: {a: " + "[" * 5000, "nested too deeply"),
        ("lengths: {day: 2001-13-41}", "month"),
        ("lengths: {n: " + "9" * 5000 + "}", "digits"),
        ("lengths: {n: !!int x}", "invalid literal"),
        ("settings: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ('settings: {a: "\\ud800"}', "utf-16"),
    ],
    ids=["bomb", "circle", "deep", "month", "digits", "tag", "object", "half a character"],
)
def test_what_yaml_can_do_to_a_plan(tmp_path: Path, line: str, said: str) -> None:
    """One error that names the file; at once, and without the memory that it asks for."""
    with pytest.raises(PlanError, match=r"plan\.yaml' is not YAML") as caught:
        load(tmp_path, line)
    assert said in str(caught.value)


def test_plans_may_have_aliases_and_any_character(tmp_path: Path) -> None:
    """Within bounds they are as good as what they stand for; also as JSON writes it, in two halves."""
    read = load(tmp_path, 'settings: {a: &a [1, 2], b: *a, c: "\\ud83d\\udca5 \\u00e9"}')
    assert read.settings == {"a": [1, 2], "b": [1, 2], "c": "\U0001f4a5 é"}


def test_documents_are_nested_so_deeply_and_no_deeper() -> None:
    """In flow and in indents; JSON as deep as Python itself can go."""
    for text in ("[" * 99 + "]" * 99, "\n".join(" " * n + "a:" for n in range(99))):
        assert read_yaml(text)
    for text in ("[" * (MOST_DEPTH + 1), "\n".join(" " * n + "a:" for n in range(MOST_DEPTH + 1))):
        with pytest.raises(ValueError, match="too deeply"):
            read_yaml(text)
    with pytest.raises(ValueError, match="too deeply"):
        read_json("[" * 100_000)


def test_functions_of_a_plan_make_keys() -> None:
    """A key is the name of a folder in the store, whatever functions are called; each has its own."""
    names = ("forward", "../../x", "<lambda>", "<lambdb>", "x" * 5000, "é", "")
    specs = tuple(InputSpec(function=name) for name in names)
    keys = [target.key for target in ShapePlan(specs=specs).targets(["cpu", "cuda:0"])]
    assert all(map(is_key, keys))
    assert len(set(keys)) == 2 * len(names)
    assert keys[0].startswith("cpu-forward-train-")


def test_no_record_names_what_is_ours() -> None:
    """A pack that brings its own records would vouch for itself."""
    with pytest.raises(UnsafePath, match="keeps what it knows"):
        FileEntry(".compilecache/records/x/y.json", 1, "0" * 32, "0" * 64)
    FileEntry("ab/.compilecache", 1, "0" * 32, "0" * 64)
