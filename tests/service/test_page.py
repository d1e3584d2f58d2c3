"""The page in a real Chromium: from empty to warm without a reload, for eyes, keyboard and screen readers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from services import TOKEN, Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HTML = '<img src=x onerror="document.title=1">'

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with sync_playwright() as play:
        launched = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


def opened(browser: Browser, service: Service, **context: object) -> tuple[Page, list[str]]:
    """A page on the service, and the errors that its script or its policy made."""
    page = browser.new_page(**context)  # type: ignore[arg-type]
    page.set_default_timeout(20_000)
    faults: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error" and "401" not in message.text:
            faults.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(service.url)
    return page, faults


def test_the_grid_goes_from_empty_to_warm_by_itself(browser: Browser, service: Service) -> None:
    """Nothing submitted; then waiting, compiling, compiled and failed, on one load of the page."""
    service.settings["devices"] = ["cuda:0", "cuda:1"]
    service.start()
    page, faults = opened(browser, service)
    expect(page.get_by_text("Nothing submitted yet")).to_be_visible()
    expect(page.locator("#live-words")).to_have_text("live")
    page.evaluate("document.body.dataset.loaded = 'once'")
    devices = ["cuda:0", "cuda:1"]
    job = service.submit("quick", "slow", "bypass", "fail", name=HTML, devices=devices)
    grid = page.locator("table.grid")
    expect(grid.locator("tbody tr")).to_have_count(4)
    expect(grid.locator("td.is-compiling")).to_have_count(1)
    expect(grid.locator("td.is-waiting").first).to_be_visible()
    expect(grid.locator("td.is-compiled")).to_have_count(4)
    expect(grid.locator("td.is-bypass")).to_have_count(2)
    expect(grid.locator("td.is-failed")).to_have_count(2)
    expect(grid.locator("td.is-compiled").first).to_contain_text(
        re.compile(r"✓ compiled\s*\d+\.\d s")
    )
    expect(grid.locator("td.is-failed").first).to_contain_text("no such shape")
    expect(page.locator("#job-title")).to_contain_text(HTML)
    expect(page.locator("#said")).to_contain_text("failed, 8 of 8 targets, 2 failed")
    assert page.evaluate("document.body.dataset.loaded") == "once"
    assert page.locator("img").count() == 0
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#job-title .tag")).to_have_text("failed")
    assert service.wait(job).state == "failed"
    assert faults == []
    page.close()


def test_why_not_warm_is_asked_and_shown(browser: Browser, shared: Service) -> None:
    """One button: what is missing, which component differs from what is published, what to do."""
    shared.wait(shared.submit("quick", "fail", name="asked about"))
    page, faults = opened(browser, shared)
    expect(page.locator("#job-title")).to_contain_text("asked about")
    page.get_by_role("button", name="Why not warm?").click()
    expect(page.locator("#job-title")).to_contain_text("Why: asked about")
    expect(page.locator("td.is-missing")).to_have_count(1)
    expect(page.locator("td.is-local")).to_have_count(1)
    why = page.locator("#job-why")
    expect(why).to_contain_text("Nearest published fingerprint: abababababab, 7 targets.")
    expect(
        why.get_by_role("row", name="torch 2.11.0 <b>abc</b> 2.13.0 def matters")
    ).to_be_visible()
    expect(why).to_contain_text("it compiles what is missing")
    assert faults == []
    page.close()


def test_the_page_goes_on_after_the_service_was_away(browser: Browser, service: Service) -> None:
    """It says so, connects again, and shows what happened meanwhile."""
    service.start()
    page, _ = opened(browser, service)
    expect(page.locator("#live-words")).to_have_text("live")
    service.submit("quick", name="before")
    expect(page.locator("td.is-compiled")).to_have_count(1)
    service.settings["port"] = service.address[1]
    service.end()
    expect(page.locator("#live-words")).to_have_text("connecting again")
    service.start()
    service.submit("quick", "quick", name="after")
    expect(page.locator("td.is-compiled")).to_have_count(2)
    expect(page.locator("#job-title")).to_contain_text("after")
    page.close()


def test_the_token_is_asked_for_and_a_wrong_one_refused(browser: Browser, locked: Service) -> None:
    """By keyboard alone; afterwards the cookie is out of reach of scripts."""
    page, faults = opened(browser, locked)
    expect(page.get_by_label("The first line of the service's token file")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").first).to_contain_text("the token is wrong")
    page.get_by_label("The first line of the service's token file").focus()
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Queue")).to_be_visible()
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("The first line of the service's token file")).to_be_visible()
    assert faults == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(
    browser: Browser, shared: Service, scheme: str
) -> None:
    """390 pixels wide, light and dark; every pair of colours has a contrast of 4.5 at least."""
    shared.wait(shared.submit("quick", "bypass", "fail", name="on a phone"))
    size = {"width": 390, "height": 844}
    page, faults = opened(browser, shared, viewport=size, color_scheme=scheme)
    expect(page.locator("table.grid td")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []
    assert faults == []
    page.close()


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (rgb) => { const [r, g, b] = rgb.slice(0, 3).map((c) => c / 255).map((c) =>
    c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (node) => { for (; node; node = node.parentElement) {
    const found = parse(getComputedStyle(node).backgroundColor);
    if (found.length === 3 || found[3] > 0.9) return found; } return [255, 255, 255]; };
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


def test_keyboard_and_screen_readers_reach_everything(browser: Browser, shared: Service) -> None:
    """Tables have headings and names, statuses words, focus is seen, and Enter chooses a job."""
    shared.wait(shared.submit("quick", name="first of two"))
    shared.wait(shared.submit("quick", "quick", name="second of two"))
    page, _ = opened(browser, shared)
    expect(page.locator("#job-title")).to_contain_text("second of two")
    for table in page.get_by_role("table").all():
        assert table.locator("th[scope=col]").count() >= 2
    assert (
        page.locator("tbody tr:not(:has([colspan]))").count()
        == page.locator("tbody th[scope=row]").count()
    )
    assert page.get_by_role("region", name="Targets by shape and device").count() == 1
    assert page.locator("[aria-live=polite]").count() == 1
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.textContent.trim().slice(0, 40), "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        seen.append(name)
        assert outline != "none", name
        if name == "first of two":
            break
    assert seen[0] == "Skip to the targets"
    assert "Why not warm?" in seen
    page.keyboard.press("Enter")
    expect(page.locator("#job-title")).to_contain_text("first of two")
    page.close()


def test_nothing_comes_from_elsewhere() -> None:
    """No address in the page, its script or its style, and no script within the page."""
    folder = Path(__file__).parent.parent.parent / "warmup" / "service" / "page"
    text = "".join(path.read_text() for path in folder.iterdir())
    assert not re.search(r"https?://|//cdn|@import|innerHTML|insertAdjacentHTML|eval\(", text)
    assert re.findall(r"<script(?! src=)", text) == []
    assert not re.search(r"\son\w+=", (folder / "page.html").read_text())
