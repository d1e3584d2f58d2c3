"""``compilecache report``: the picture of a warm-up, on the terminal and as one file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from places import Place
from processes import Template

from compilecache.evidence import Evidence, Outcome
from compilecache.picture.grid import MEANINGS, SIGNS, grid_of
from compilecache.picture.last import keep_report
from compilecache.picture.page import render
from compilecache.report import Report, Status, TargetReport


def seen(outcome: Outcome, seconds: float = 1.25) -> Evidence:
    """Evidence of a run."""
    return Evidence(
        outcome=outcome,
        hits=int(outcome == "hit"),
        misses=int(outcome == "miss"),
        bypasses=int(outcome == "bypass"),
        launches=0,
        seconds=seconds,
        again_seconds=0.01,
    )


def row(shape: str, device: str, status: Status, evidence: Evidence | None) -> TargetReport:
    """One target."""
    return TargetReport(
        key=f"{device}-{shape}",
        target=f"forward train seq_len={shape} mask=full on {device}",
        device=device,
        status=status,
        evidence=evidence,
        error="out of memory. Free some" if status == "failed" else None,
    )


def report(*rows: TargetReport) -> Report:
    """Of these targets."""
    return Report(
        fingerprint="ab" * 16, engine="trace", root="/cache", store="s3://b/c", targets=rows
    )


MIXED = report(
    row("512", "cuda:0", "compiled", seen("miss", 12.3)),
    row("1024", "cuda:0", "compiled", seen("bypass")),
    row("512", "cuda:1", "restored", seen("hit")),
    row("<b>", "cuda:1", "failed", None),
)


def test_the_grid_has_shapes_down_and_devices_across() -> None:
    """What all share is said once; what was not reached has no cell; bypass is a status of its own."""
    grid = grid_of(MIXED)
    assert grid.devices == ("cuda:0", "cuda:1")
    assert grid.shapes == (
        "forward train seq_len=512",
        "forward train seq_len=1024",
        "forward train seq_len=<b>",
    )
    assert grid.common == "mask=full"
    assert {at: cell.status for at, cell in grid.cells.items()} == {
        (0, 0): "compiled",
        (1, 0): "bypass",
        (0, 1): "restored",
        (2, 1): "failed",
    }
    assert grid.statuses() == {"restored": 1, "compiled": 1, "bypass": 1, "failed": 1}


def test_every_status_has_a_sign_and_a_meaning() -> None:
    """Nobody depends on a colour."""
    assert SIGNS.keys() == MEANINGS.keys()
    page = render(MIXED)
    for status in ("compiled", "bypass", "restored", "failed"):
        assert MEANINGS[status] in page


class Reader(HTMLParser):
    """Tags of a page and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_file_needs_nothing_else_and_escapes_every_name() -> None:
    """No script, no link, no picture; HTML in a shape, an error, a note or an address stays text."""
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    bad = MIXED.targets[3].model_copy(
        update={"error": evil, "target": f"{evil} on {evil}", "device": evil, "notes": (evil,)}
    )
    told = MIXED.model_copy(
        update={"targets": (*MIXED.targets, bad), "gave_up": (evil,), "store": evil}
    )
    tags = Reader(render(told)).tags
    assert {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "a", "base", "b"} == set()
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


def test_the_table_has_headings_for_screen_readers() -> None:
    """Every table has column headings, every row one of its own."""
    tags = Reader(render(MIXED)).tags
    scopes = [attributes.get("scope") for tag, attributes in tags if tag == "th"]
    assert None not in scopes
    assert scopes.count("row") == 3 + 4
    assert ("html", {"lang": "en"}) in tags


def test_report_shows_the_last_warm_up_of_the_root(fresh: Template, place: Place) -> None:
    """As a table, as JSON and as a file; 3 when something is not warm, 2 where there is none."""
    ended = fresh.command("report", "--root", place.root)
    assert ended.code == 2
    assert "holds no report" in ended.err
    (place.root / ".compilecache").mkdir(parents=True)
    keep_report(place.root, MIXED)
    ended = fresh.command("report", "--root", place.root)
    assert ended.code == 3
    assert "✓ compiled 12.3 s" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    page = place.folder / "page.html"
    ended = fresh.command("report", "--root", place.root, "--html", page, "--json")
    assert ended.json == MIXED.model_dump(mode="json")
    assert page.read_text() == render(MIXED)


def test_report_reads_what_warm_printed(fresh: Template, warmed: Place, tmp_path: Path) -> None:
    """A file with the output of 'warm --json', and the root's own report, say the same."""
    done = fresh.command("warm", *warmed.words, "--json")
    assert done.code == 0, done.err
    path = tmp_path / "report.json"
    path.write_text(done.out)
    from_file = fresh.command("report", path)
    from_root = fresh.command("report", "--root", warmed.root)
    assert from_file.code == from_root.code == 0, from_file.err
    assert from_file.out == from_root.out
    assert "✓ local" in from_file.out
    path.write_text("{}")
    assert "is no report" in fresh.command("report", path).err


def test_many_devices_get_signs_without_words() -> None:
    """Eight GPUs fit a terminal."""
    from io import StringIO

    from rich.console import Console

    rows = [row("512", f"cuda:{n}", "compiled", seen("miss")) for n in range(8)]
    out = StringIO()
    Console(file=out, width=100).print(grid_of(report(*rows)))
    assert "✓ 1.2 s" in out.getvalue()
    assert "compiled (8)" in out.getvalue()
