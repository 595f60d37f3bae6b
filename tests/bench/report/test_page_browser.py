"""The page of a result in a real browser: Chromium without a window, driven by selenium."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.report import gain
from bench.report import loaders_page as page
from tests.bench.report.test_gain import fed
from tests.bench.rich_result import HOSTILE, rich_result

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
    return [chart.width, chart.height, chart.right - figure.getBoundingClientRect().right] })"
DRAWN = "return document.querySelectorAll('.barlayer .point, .scatterlayer .trace').length"
TEXT_COLOURS = "return [...new Set([...document.querySelectorAll('.main-svg text')].map(\
    text => getComputedStyle(text).fill))]"
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
CHARTS = 12
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
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page.html(rich_result()), encoding="utf-8")
    return path.as_uri()


def show(browser: Any, address: str, width: int, scheme: str = "light", media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(address)
    browser.execute_script(UNFOLD)
    # charts are drawn behind that, later on a busy machine
    wait.WebDriverWait(browser, 60).until(lambda opened: len(opened.execute_script(SIZES)) == CHARTS)
    wait.WebDriverWait(browser, 60).until(lambda opened: opened.execute_script(DRAWN) > 2 * 140)


@pytest.mark.parametrize("width", [1200, 390])
def test_charts_have_size_and_nothing_sticks_out(browser: Any, address: str, width: int) -> None:
    show(browser, address, width)
    sizes = browser.execute_script(SIZES)
    assert len(sizes) == CHARTS
    assert all(250 <= chart_width <= width and height >= 150 for chart_width, height, _ in sizes)
    assert all(over_edge < 1 for _, _, over_edge in sizes)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(DRAWN) > 2 * 140
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


def test_on_a_phone_no_table_breaks_a_word_in_its_middle(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    today, first, *others = (fed("imagefolder", "raw tree", 0.3), *rich_result().rows)
    converted = [fed(name, name, 0.9) for name in ("shards", "webdataset", "dali")]
    path.write_text(page.html(replace(rich_result(), rows=(today, first, *converted, *others))))
    show(browser, path.as_uri(), 390)
    assert browser.execute_script(BROKEN) == []


def test_nothing_is_fetched(browser: Any, address: str) -> None:
    show(browser, address, 1200)
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_the_verdict_is_what_one_sees_first(browser: Any, address: str) -> None:
    show(browser, address, 390)
    verdict = browser.find_element("css selector", ".verdict")
    (sentence,) = gain.sentences(rich_result())
    assert verdict.text == sentence.replace("`", "")
    assert verdict.rect["y"] < 150


def test_names_are_text_in_charts_too(browser: Any, address: str) -> None:
    show(browser, address, 1200)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('.annotation-text')].map(text => text.textContent)"
    )
    assert f"dali (ours, dali{HOSTILE}"[:29] + "…: 2,300 (93% busy)" in labels
    browser.switch_to.default_content()  # raises if the name's alert() were open


def test_a_chart_that_was_folded_has_the_width_of_its_place_once_it_is_shown(
    browser: Any, address: str
) -> None:
    show(browser, address, 390)
    widths = browser.execute_script(
        "return [...document.querySelectorAll('details figure')].map(figure => "
        "[figure.querySelector('.main-svg').getBoundingClientRect().width, figure.clientWidth])"
    )
    assert len(widths) == CHARTS - 1
    assert all(chart == pytest.approx(place, abs=2) for chart, place in widths)


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
    show(browser, address, 1200, scheme, media)
    assert browser.execute_script(TEXT_COLOURS) == [text]
    body = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(body) == background
