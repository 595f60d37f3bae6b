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
TEXT_COLOURS = "return [...new Set([...document.querySelectorAll('.main-svg text')].map(\
    text => getComputedStyle(text).fill))]"
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


def show(browser: Any, address: str, width: int, scheme: str = "light", media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(address)
    browser.execute_script(UNFOLD)
    # charts are drawn behind that, later on a busy machine
    wait.WebDriverWait(browser, 60).until(lambda opened: len(opened.execute_script(SIZES)) == FIGURES)
    wait.WebDriverWait(browser, 60).until(lambda opened: opened.execute_script(DRAWN) > 2 * 140)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_and_nothing_goes_wrong(browser: Any, address: str, width: int) -> None:
    show(browser, address, width)
    wait.WebDriverWait(browser, 20).until(  # a chart that was folded is drawn anew as wide as its place
        lambda opened: all(abs(chart - place) <= 2 for chart, _, place in opened.execute_script(SIZES))
    )
    sizes = browser.execute_script(SIZES)
    assert all(250 <= chart <= width and height >= 150 for chart, height, _ in sizes)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []
    assert browser.execute_script(BROKEN) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["sweep", "accuracy"])
def test_other_pages_fit_too(browser: Any, tmp_path: Path, page: str, width: int) -> None:
    points = [measured(point(workers, batch), 300 * workers) for batch in (64, 128) for workers in (1, 2, 4)]
    pages = {
        "sweep": lambda: sweep.html(found(*points), "one run each"),
        "accuracy": lambda: accuracy.html(lines(), 1.0),
    }
    path = tmp_path / "page.html"
    path.write_text(pages[page](), encoding="utf-8")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    browser.execute_script(UNFOLD)
    wait.WebDriverWait(browser, 20).until(
        lambda opened: all(abs(chart - place) <= 2 for chart, _, place in opened.execute_script(SIZES))
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


def test_the_answer_is_what_one_sees_first_and_the_rest_is_folded(browser: Any, address: str) -> None:
    show(browser, address, 390)
    browser.get(address)
    answer = browser.find_element("css selector", ".verdict")
    assert answer.text.startswith("ImageFolder and DataLoader keep an emulated accelerator")
    assert answer.rect["y"] < 150
    folded = browser.find_elements("css selector", "details")
    assert len(folded) == 3
    assert all(each.rect["height"] < 60 for each in folded)


@pytest.mark.parametrize(
    ("scheme", "media", "text", "background"),
    [
        ("light", "", "rgb(28, 30, 33)", "rgb(255, 255, 255)"),
        ("dark", "", "rgb(230, 232, 235)", "rgb(21, 23, 26)"),
        ("dark", "print", "rgb(0, 0, 0)", "rgb(255, 255, 255)"),
    ],
)
def test_charts_follow_dark_mode_and_print(
    browser: Any, address: str, scheme: str, media: str, text: str, background: str
) -> None:
    show(browser, address, 1280, scheme, media)
    assert browser.execute_script(TEXT_COLOURS) == [text]
    body = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(body) == background
