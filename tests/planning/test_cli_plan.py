"""The command ``compilecache plan``, without a run to observe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import compilecache
from compilecache.cli.plan import plan
from compilecache.errors import PlanError
from compilecache.shapes import ShapePlan

ROOT = Path(compilecache.__file__).parents[1]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A source of a hundred lengths."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"length": {20 * n}}}\n' for n in range(1, 101)))
    return str(path)


def run(*words: str) -> Result:
    """The command in this process, in a terminal of 80 columns."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(plan, words)


def test_it_shows_the_curve_the_knee_and_every_target(rows: str, tmp_path: Path) -> None:
    """In 80 columns; what was written is said on stderr."""
    output = tmp_path / "plan.yaml"
    words = ["--lengths", rows, "--device", "cuda:0,cuda:1", "--batch", "1,2"]
    result = run(*words, "--output", str(output))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("█" in line for line in lines) == 16
    assert next(line for line in lines if "knee" in line).split()[-2:] == ["knee", "chosen"]
    assert result.stderr == f"Wrote {output}.\n"
    written = ShapePlan.load(output)
    assert sum(line.startswith(" cuda:1") for line in lines) == len(written.specs)
    assert f"{2 * len(written.specs)} targets to compile" in result.stdout


def test_json_is_data_alone(rows: str) -> None:
    """Plan, curve and targets on stdout; the note that nothing was written on stderr."""
    result = run("--lengths", rows, "--buckets", "3", "--phase", "train", "--json")
    data = json.loads(result.stdout)
    assert ShapePlan.parse(data["plan"]).sizes() == tuple(data["curve"][2]["edges"])
    assert [point["knee"] for point in data["curve"]].count(True) == 1
    assert [target["device"] for target in data["targets"]] == ["cuda:0"] * 3
    assert "--output" in result.stderr


def test_explicit_buckets_need_no_source() -> None:
    """There is no curve then, only targets."""
    result = run("--seq-lens", "512,1024", "--device", "cpu")
    assert result.exit_code == 0
    assert "4 targets to compile" in result.stdout
    assert "padding" not in result.stdout.lower()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--lengths", "absent.jsonl"], "lengths"),
        (["--seq-lens", "0"], "--seq-lens"),
        (["--seq-lens", "8", "--batch", "x"], "--batch"),
        (["--seq-lens", "8", "--set", "x"], "set"),
        (["--seq-lens", "8", "--device", "cuda"], "device"),
        (["--seq-lens", "8,16", "--limit", "3"], "specs"),
        (["--seq-lens", "8", "--workload", "x"], "workload"),
        ([], "lengths"),
    ],
)
def test_bad_input_is_one_plan_error(words: list[str], field: str) -> None:
    """It names the option or field."""
    result = run(*words)
    assert isinstance(result.exception, PlanError)
    assert result.exception.field == field


def test_wrong_usage_is_exit_code_two(rows: str) -> None:
    """A command without --observe, --observe without one, or with options of planning."""
    for words in (
        ["--", "python"],
        ["--observe"],
        ["--observe", "--lengths", rows, "--", "python"],
        ["--buckets", "0"],
    ):
        assert run(*words).exit_code == 2


def test_it_starts_without_torch_numpy_or_pyarrow(rows: str) -> None:
    """A plan from JSONL imports none of them."""
    script = (
        "import sys; from compilecache.cli.plan import plan; "
        f"plan(['--lengths', {rows!r}], standalone_mode=False); "
        "print(sorted({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
