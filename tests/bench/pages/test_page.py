"""The page of a result, without a browser."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from bench.findings.result import Result
from bench.findings.verdict import COLD_FETCH
from bench.pages import charts
from bench.pages import loaders as page
from bench.pages import table as report
from precache.errors import SettingError
from tests.bench.rich_result import BATCH_SIZE, EXPLANATION, HOSTILE, altered, rich_result, row


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
    sentences = report.headline(result)
    assert said[2 : 2 + len(sentences)] == sentences
    advice = result.rows[0].advice.text
    assert advice.startswith("decoding binds")
    assert f"pytorch on raw tree: {advice}" in said[: said.index("How fast")]


def test_every_field_has_its_chart_or_sentence(content: Content) -> None:
    assert content.captions == [
        "Fed to emulated:2480: images/s, and share of the trainer's own rate",
        "Loaders alone: images/s",
        "What each stage can do alone",
        "Where a batch's time goes",
        "Throughput over time",
        "Time of each batch",
        "Busy or filled, share",
        "Disk, network and swap, MB/s",
        "Memory, GiB",
        "Power, W",
        "Clocks, MHz",
    ]
    (findings,) = (line for line in content.texts if line.startswith("What binds"))
    assert findings.startswith("What binds: decode. Predicted 1,160 images/s, measured ")
    assert "MLPerf Storage asks for 90%" in findings
    assert "The first batch came after 400 ms." in findings
    assert "The first step took 3,210 ms, the others 25.7 ms (median)." in findings
    assert EXPLANATION in findings
    assert "GPU memory was filled to 93%" in findings
    assert {"first step, s", "24.7 GB/s"} <= set(content.texts)


def test_what_a_result_lacks_is_left_out() -> None:
    content = Content(page.html(older_result()))
    assert len(content.captions) == 2
    assert not {"cold", "predicted", "waits, share", "computes, share"} & set(content.texts)
    assert "host to device" not in content.texts
    alone = replace(older_result(), rows=(row("shards", "shards", 24000, trainer=None, ratio=None),))
    content = Content(page.html(alone))
    assert content.captions == ["Loaders alone: images/s"]
    assert (
        "Measured without a trainer. The fastest loader is shards on shards: 24,000 images/s."
        in content.texts
    )


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
    said = "From a cold cache each batch would take 159 ms more."
    assert said in page.html(replace(rich, rows=(cold,)))
    assert said not in page.html(replace(rich, rows=(waiting,)))


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
    assert text.partition("<h2>Numbers</h2>")[2].count("<tr>") == len(result.rows) + 1
    assert "1,150" in content.texts
    assert "1,104 to 1,196" in content.texts
    assert result.machine["cpu"] in content.texts


def test_what_one_could_do_is_a_table_the_fastest_first() -> None:
    rich = rich_result()
    waiting = rich.rows[0]
    content = Content(page.html(replace(rich, rows=(waiting,))))
    start = content.texts.index("What one could do")
    assert content.texts[start : start + 15] == [
        *("What one could do", "images/s", "measured or predicted", "takes"),
        *("Converting to shards", "2,470", "predicted", "at least 51 s and 6.0 GB"),
        *(f"Backend dali on {HOSTILE}", "2,300", "2,208 to 2,392", "measured"),
        *("Four workers", "1,900", "predicted"),
    ]
    assert "What one could do" not in page.html(replace(rich, rows=(altered(waiting, changes=[]),)))


def test_sections_are_linked() -> None:
    rich = rich_result()
    first, *others = rich.rows
    content = Content(page.html(replace(rich, rows=(first, altered(first, data="second"), *others))))
    links = {value for _, name, value in content.attributes if name == "href" and value[0] == "#"}
    places = {f"#{value}" for tag, name, value in content.attributes if (tag, name) == ("h2", "id")}
    assert links == places == {"#row0", "#row1"}


def test_a_result_without_rows_is_refused(result: Result) -> None:
    with pytest.raises(SettingError, match=r"not a result of 'bench loaders'.*rows"):
        Result.from_json({**result.to_json(), "rows": []})


def test_the_same_result_gives_the_same_page(result: Result, text: str) -> None:
    assert page.html(result) == text


def test_a_table_has_its_words_to_the_left_and_shows_code_as_such() -> None:
    drawn = page.table(("loader", "rate", "why"), [("shards", "12", "`a<b` is"), ("dali", "-", "none")])
    assert drawn.count('<td class="words">') == 4
    assert "<td>12</td>" in drawn
    assert '<th class="words">loader</th><th>rate</th>' in drawn
    assert "<code>a&lt;b</code> is" in drawn
