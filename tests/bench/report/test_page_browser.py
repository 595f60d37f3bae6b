"""The page of a result in a real browser: Chromium without a window, driven by selenium."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.report import accuracy, loaders_page, sweep
from tests.bench.report.test_accuracy import lines
from tests.bench.report.test_gain import fed
from tests.bench.report.test_sweep import found, measured, point
from tests.bench.rich_result import around, rich_result

webdriver = pytest.importorskip("selenium.webdriver", reason="run: pip install selenium")
wait = pytest.importorskip("selenium.webdriver.support.wait", reason="run: pip install selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="run: apt-get install -y chromium chromium-driver"),
    pytest.mark.timeout(300),
]
SIZES = "return [...document.querySelectorAll('figure')].map(figure => {\
    const chart = (figure.querySelector('.main-svg') || figure).getBoundingClientRect();\
    return [chart.width, chart.height, figure.clientWidth] })"
DRAWN = "return document.querySelectorAll('.barlayer .point, .scatterlayer .trace').length"
CUT_OFF = """
const texts = '.lane > *, th, td, dd, p, summary, .legendtext, .annotation-text';
return [...document.querySelectorAll(texts)].filter(cell => {
  const place = cell.getBoundingClientRect();
  const around = (cell.closest('figure') || document.body).getBoundingClientRect();
  return place.width && (place.left < around.left - 1 || place.right > around.right + 1 ||
    cell.scrollWidth > cell.clientWidth + 1 && cell.clientWidth > 0);
}).map(cell => cell.textContent)
"""
"""Texts that stick out of the page or of their chart, or are wider than their own place."""
BROKEN = r"""
const broken = [];
for (const cell of document.querySelectorAll('th, td')) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode())
    for (const word of node.data.matchAll(/[\w().]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (word[0].length <= 14 && range.getClientRects().length > 1) broken.push(word[0]); } }
return broken
"""
FIGURES = 7
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(switch)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    with driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a page with every chart, several loaders and a hostile name."""
    rich = rich_result()
    converted = [fed(name, name, 0.9, cold=around(9_000)) for name in ("shards", "webdataset")]
    rows = (fed("imagefolder", "raw tree", 0.3), rich.rows[0], *converted, *rich.rows[2:])
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(loaders_page.html(replace(rich, rows=rows), 2.5), encoding="utf-8")
    return path.as_uri()


def show(browser: Any, address: str, width: int) -> None:
    """Open the page with everything unfolded, and wait until each chart is drawn as wide as its place."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)
    browser.execute_script(UNFOLD)
    wait.WebDriverWait(browser, 60).until(
        lambda opened: all(abs(chart - place) <= 2 for chart, _, place in opened.execute_script(SIZES))
    )


def check_fits(browser: Any, width: int) -> None:
    """That nothing is cut off, asked of a network or wrong."""
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_a_screen_and_a_phone(browser: Any, address: str, tmp_path: Path, width: int) -> None:
    show(browser, address, width)
    wait.WebDriverWait(browser, 60).until(lambda opened: opened.execute_script(DRAWN) > 2 * 140)
    sizes = browser.execute_script(SIZES)
    assert len(sizes) == FIGURES
    assert all(250 <= chart <= width and height >= 150 for chart, height, _ in sizes)
    assert browser.execute_script(BROKEN) == []
    check_fits(browser, width)
    points = [measured(point(workers, batch), 300 * workers) for batch in (64, 128) for workers in (1, 2, 4)]
    for page in (sweep.html(found(*points), "one run each"), accuracy.html(lines(), 1.0)):
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        show(browser, (tmp_path / "page.html").as_uri(), width)
        check_fits(browser, width)
