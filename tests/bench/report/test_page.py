"""The page of a result, without a browser."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from bench.report import charts, gain
from bench.report import loaders_page as page
from bench.report import table as report
from bench.report.result import Result
from bench.report.verdict import COLD_FETCH
from precache.errors import SettingError
from tests.bench.report.test_gain import fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import (
    BATCH_SIZE,
    EXPLANATION,
    HOSTILE,
    altered,
    around,
    change,
    peer,
    rich_result,
    row,
)


class Content(HTMLParser):
    """A page's texts, figure captions and links; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.captions: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["figcaption"]:
            self.captions.append(data)
        if self._open[-1:] not in (["style"], ["script"]):
            self.texts.append(data)


@pytest.fixture(scope="module")
def result() -> Result:
    return rich_result()


@pytest.fixture(scope="module")
def text(result: Result) -> str:
    return page.html(result)


@pytest.fixture(scope="module")
def content(text: str) -> Content:
    return Content(text)


def older_result() -> Result:
    """What files from before batch times were kept hold."""
    rich = rich_result()
    return replace(rich, rows=(row("shards", "shards", 24000),), skipped={}, host_to_device_gbps=None)


def test_the_verdict_comes_first_and_in_words(result: Result, content: Content) -> None:
    said = [line for line in content.texts if line.strip()]
    assert said[1] == "Does the trainer wait for data?"  # after the title
    shown = " ".join("".join(content.texts).split())
    (sentence,) = gain.sentences(result)
    place = shown.index(sentence.replace("`", ""))
    assert place < shown.index("Accelerator busy: share of the time") < shown.index("The table")
    advice = result.rows[0].advice.text
    assert advice.startswith("decoding is the bottleneck")
    assert f"pytorch (ours, raw tree): {advice}" in said
    assert set(report.headline(result)) <= set(said)


def test_every_field_has_its_chart_or_sentence(content: Content) -> None:
    assert content.captions == [
        "Accelerator busy: share of the time that it has work (emulated:2480, which takes 2,480 images/s)",
        "Fed to emulated:2480: images/s, and how busy that keeps the accelerator",
        "Loaders alone: images/s",
        "What each stage can do alone, storage from a cold disk",
        "Where a batch's time goes, files in memory",
        "Throughput over time",
        "Time of each batch",
        "Busy or filled, share",
        "Disk, network and swap, MB/s",
        "Memory, GiB",
        "Power, W",
        "Clocks, MHz",
    ]
    (findings,) = (line for line in content.texts if line.startswith("The bottleneck from a cold disk:"))
    assert findings.startswith("The bottleneck from a cold disk: decode. Predicted 1,160 images/s, measured ")
    assert "MLPerf Storage asks for 90%" in findings
    assert "The first batch came after 400 ms." in findings
    assert "The first step took 3,210 ms, the others 25.7 ms (median)." in findings
    assert EXPLANATION in findings
    assert "GPU memory was filled to 93%" in findings
    assert {"first step, s", "24.7 GB/s"} <= set(content.texts)


def test_what_a_result_lacks_is_left_out() -> None:
    content = Content(page.html(older_result()))
    assert len(content.captions) == 3
    assert not {"cold", "predicted", "waits, share", "computes, share"} & set(content.texts)
    assert "host to device" not in content.texts
    alone = replace(older_result(), rows=(row("shards", "shards", 24000, trainer=None, ratio=None),))
    content = Content(page.html(alone))
    assert content.captions == ["Images per second, each loader alone", "Loaders alone: images/s"]
    assert " delivers 24,000 images/s." in "".join(content.texts)


def test_the_waterfall_ends_at_the_whole_batch() -> None:
    waiting = rich_result().rows[0]
    assert waiting.together is not None
    (bars,) = charts.waterfall(waiting, BATCH_SIZE).data
    *parts_ms, whole_ms = bars.x
    assert whole_ms == pytest.approx(sum(parts_ms))
    assert whole_ms == pytest.approx(BATCH_SIZE / waiting.together.median * 1e3)
    assert len(parts_ms) == 5  # compute, three stalls, and what these do not explain
    explained = altered(waiting, stalls={"prep": (whole_ms - parts_ms[0]) / 1e3})
    (bars,) = charts.waterfall(explained, BATCH_SIZE).data
    assert len(bars.x) == 3


def test_what_a_cold_cache_adds_is_said_and_not_in_the_warm_waterfall() -> None:
    rich = rich_result()
    waiting = rich.rows[0]
    cold = altered(waiting, stalls={**waiting.stages.stalls, COLD_FETCH: 0.159})
    assert charts.waterfall(cold, BATCH_SIZE) == charts.waterfall(waiting, BATCH_SIZE)
    said = "From a cold disk each batch would take 159 ms more."
    assert said in page.html(replace(rich, rows=(cold,)))
    assert said not in page.html(replace(rich, rows=(waiting,)))


def test_a_prediction_that_is_far_off_says_so_and_why() -> None:
    rich = rich_result()
    far = altered(rich.rows[0], predicted=2_400.0)
    assert "The prediction is 101% too high: loader and trainer" in page.html(replace(rich, rows=(far,)))
    assert "The prediction is" not in page.html(rich)


def test_spikes_and_epochs_stand_where_they_were() -> None:
    waiting = rich_result().rows[0]
    traces = {trace.name: trace for trace in charts.batch_strip(waiting).data}
    assert waiting.batches.spikes is not None
    assert tuple(traces["spike"].x) == waiting.batches.spikes.wait_spikes.batches
    assert [start for start in traces["first batch of an epoch"].x[::3]] == list(waiting.batches.epoch_starts)
    assert traces["wait"].y == pytest.approx([1e3 * seconds for seconds in waiting.batches.wait_s])


def test_peers_are_told_apart(result: Result, text: str, content: Content) -> None:
    peers = [row for row in result.rows if row.peer]
    assert len(peers) == 3
    assert content.texts.count("for comparison") == len(peers)
    assert text.count("for comparison: another library or the limit") == 1


def test_names_cannot_become_markup(result: Result, text: str, content: Content) -> None:
    assert HOSTILE not in text
    assert f"dali on dali{HOSTILE}" in "".join(content.texts)
    harmless = json.loads(json.dumps(result.to_json()).replace(json.dumps(HOSTILE)[1:-1], "harmless"))
    assert text.count("<script") == page.html(Result.from_json(harmless)).count("<script")


def test_it_needs_no_network(text: str, content: Content) -> None:
    own = text.replace(get_plotlyjs(), "")
    assert len(own) < len(text)
    assert not re.search(r"https?://|url\(|@import|<link", own)
    for _, name, value in content.attributes:
        assert name not in ("src", "srcset")
        assert name != "href" or value.startswith(("data:", "#"))


def test_the_download_is_the_result(result: Result, content: Content) -> None:
    (address,) = (value for _, name, value in content.attributes if name == "href" and value[0] != "#")
    kind, _, data = address.partition(",")
    assert kind == "data:application/json;base64"
    assert ("a", "download", "result.json") in content.attributes
    assert Result.from_json(json.loads(base64.b64decode(data))) == result


def test_the_table_has_a_row_per_row(result: Result, text: str, content: Content) -> None:
    assert text.partition("<summary>All numbers</summary>")[2].count("<tr>") == len(result.rows) + 1
    assert "1,150" in content.texts
    assert "1,104 to 1,196" in content.texts
    assert result.machine["cpu"] in content.texts


def test_what_would_gain_is_a_table_the_fastest_first_and_says_cold_or_warm() -> None:
    rich = rich_result()
    waiting = rich.rows[0]
    content = Content(page.html(replace(rich, rows=(waiting,))))
    start = content.texts.index("What would gain")
    assert content.texts[start : start + 15] == [
        *("What would gain", "images/s", "measured or predicted", "takes"),
        *("Converting to shards", "2,470", "predicted with the files in memory", "5.59 GiB"),
        *(f"Backend dali on {HOSTILE}", "2,300", "2,208 to 2,392", "measured from a cold disk"),
        *("Four workers", "1,900", "predicted with the files in memory"),
    ]


def test_a_change_that_gains_nothing_is_not_listed() -> None:
    waiting = rich_result().rows[0]
    assert waiting.together is not None
    fed = altered(waiting, cold=None)
    now = fed.now.median
    assert (now, altered(waiting, cold=around(640)).now.median) == (waiting.together.median, 640)
    for rate, listed in ((now * 0.9, False), (now * 1.01, False), (now * 1.5, True)):
        row = altered(fed, changes=[change("Converting to webdataset", rate, measured=True)])
        drawn = page.html(replace(rich_result(), rows=(row,))).partition("In detail")[2]
        assert ("Converting to webdataset</td>" in drawn) == listed, rate


def test_one_share_is_one_number_on_the_whole_page() -> None:
    row = altered(fed("shards", "shards", 1.0), together=around(2_554), ratio=around(1.03))
    drawn = page.html(gain_result(fed("imagefolder", "raw tree", 0.31), row))
    assert "100%" in drawn
    assert "103%" not in drawn
    assert "1.03<" not in drawn


def test_the_loader_is_told_from_the_library_of_its_name() -> None:
    drawn = page.html(gain_result(fed("webdataset", "webdataset", 0.5), fed("pytorch", "raw tree", 0.5)))
    assert '<div class="name">webdataset (ours)</div>' in drawn
    assert '<div class="name">pytorch (ours, raw tree)</div>' in drawn
    assert "ours: this project" in drawn


def test_all_but_the_sentence_and_the_first_chart_is_folded(text: str) -> None:
    rich = rich_result()
    first, *others = rich.rows
    drawn = page.html(replace(rich, rows=(first, replace(first, data="second"), *others)))
    titles = re.findall(r"<details><summary>(.*?)</summary>", drawn)
    assert titles == [
        "The table",
        "The bottleneck of each loader, and what would fix it",
        "Images/s: fed to the trainer, and alone",
        "In detail: pytorch (ours, raw tree)",
        "In detail: pytorch (ours, second)",
        "All numbers",
        "Machine, versions and settings",
    ]
    unfolded = re.sub(r"<details>.*?</details>", "", drawn.partition("</head>")[2], flags=re.DOTALL)
    assert re.findall(r"<figcaption>([^:<]*)", unfolded) == ["Accelerator busy"]


def test_each_loader_says_what_it_saves_of_an_hour() -> None:
    result = quick_result()
    with_money, without = page.html(result, 2.5), page.html(result)
    assert "saves 41 of 60 min, $1.72 an hour" in with_money
    assert "saves 41 of 60 min<" in without
    assert "what people have today" in without
    assert with_money.count(">saves ") == 2
    assert "as today, within noise" in without
    assert "slower than today" in without
    assert 'class="lane best"><div class="name">shards' in without


def test_beside_other_busy_processes_no_loader_saves_anything() -> None:
    result = quick_result()
    busy = page.html(replace(result, settings={**result.settings, "other_cpu": 0.4}))
    assert "Other processes took 40% of the CPUs" in busy
    assert ">saves " not in busy
    assert "lane best" not in busy


def quick_result() -> Result:
    """As of `bench quickstart`."""
    return gain_result(
        fed("imagefolder", "raw tree", 0.31),
        fed("pytorch", "raw tree", 0.5),
        fed("shards", "shards", 0.99),
        fed("webdataset", "webdataset", 0.31),
        fed("dali", "dali", 0.2),
        peer("ffcv-raw", "raw pixels", 20_000),
    )


def test_a_result_without_rows_is_refused(result: Result) -> None:
    with pytest.raises(SettingError, match=r"not a result of 'bench loaders'.*rows"):
        Result.from_json({**result.to_json(), "rows": []})


def test_the_same_result_gives_the_same_page(result: Result, text: str) -> None:
    assert page.html(result) == text
