"""A result made by hand, as the terminal shows it and as its page does, without a browser."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from bench.report import loaders_page
from bench.report.result import COLUMNS, Showing, legend, next_step, show, table
from bench.report.row import Result
from bench.report.verdict import sentences
from tests.bench.report.test_gain import ALONE, fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import EXPLANATION, HOSTILE, altered, around, peer, rich_result, row

DATA = {"shards on shards": {"samples": 768, "digest": "0", "path": "data/shards"}}
ROWS = (
    fed("shards", "shards", 0.99, cold=around(10_500)),
    fed("imagefolder", "raw tree", 0.31, cold=around(780)),
    fed("pytorch", "raw tree", 0.5),
    row("synthetic", "raw tree", 90_000),
    peer("ffcv-raw", "raw pixels", 20_000),
    peer("gather", "shards", 40_000),
)


def quick_result(**settings: object) -> Result:
    return gain_result(*ROWS, **settings)


def test_a_newcomer_sees_five_columns_and_what_people_have_today_first() -> None:
    shown = table(quick_result())
    assert shown.titles == ["loader", "images/s", "accelerator busy", "from a cold disk", "first batch"]
    assert shown.rows == [
        ["imagefolder (torchvision)", "20,000", "31%", "780", "0.40 s"],
        ["shards (ours)", "20,000", "99%", "10,500", "0.40 s"],
        ["pytorch (ours, raw tree)", "20,000", "50%", "not measured", "0.40 s"],
        ["ffcv-raw", "20,000", "not measured", "not measured", "0.40 s"],
    ]
    assert list(shown.bold) == [1]
    assert list(table(quick_result(other_cpu=0.4)).bold) == []
    both = table(gain_result(ROWS[1], altered(ROWS[1], trainer_name="resnet50"))).rows
    assert [line[0].partition(", ")[2] for line in both] == ["fed to emulated:2480", "fed to resnet50"]
    assert [line[0] for line in table(gain_result(ROWS[3])).rows] == ["synthetic (noise)"]  # all there is


def test_details_have_every_row_and_column_and_each_that_is_shown_is_explained() -> None:
    shown = table(rich_result(), details=True)
    assert set(shown.titles) == {"loader", *(column.title for column in COLUMNS)}
    assert len(shown.rows) == len(rich_result().rows)
    assert not any("" in line for line in shown.rows)
    for details in (True, False):
        for result in (rich_result(), quick_result(), gain_result(row("shards", "shards", 9, **ALONE))):
            said, titles = legend(result, details=details), table(result, details=details).titles
            for column in COLUMNS:
                assert (f"{column.title}: {column.means}" in said) == (column.title in titles)


def test_what_to_do_next_is_the_line_that_gains_most_or_what_converting_would_bring() -> None:
    places = ("imagefolder on raw tree", "pytorch on raw tree", "shards on shards")
    data = {place: {"samples": 9, "digest": "0", "path": place.split()[-1]} for place in places}
    shards, today, line, *_ = ROWS
    assert "loaders.build('shards')" in next_step(gain_result(today, line, shards, data=data))
    raw = gain_result(today, fed("pytorch", "raw tree", 0.3), data=data)
    assert "'bench recommend tree'" in next_step(raw)
    for nothing in (
        gain_result(fed("imagefolder", "raw tree", 0.99), shards, data=data),
        gain_result(today, shards, data=data, other_cpu=0.4),
        gain_result(shards, data=data),
    ):
        assert next_step(nothing) == ""


def test_it_is_shown_in_100_columns_the_answer_first(capsys: pytest.CaptureFixture[str]) -> None:
    for details in (True, False):
        show(quick_result(), Showing(details=details, gpu_price=2.5))
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 100 for line in lines)
        assert lines[0].startswith("ImageFolder and DataLoader keep an emulated accelerator")
        assert lines.index("") < next(at for at, line in enumerate(lines) if line.startswith("loader "))
        assert any("--html FILE" in line for line in lines) != details


class Content(HTMLParser):
    """A page's texts, captions and attributes; every element must be closed in order."""

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
        inside = self._open[-1:]
        if inside == ["figcaption"]:
            self.captions.append(data)
        if inside not in (["style"], ["script"]):
            self.texts.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return loaders_page.html(rich_result())


def test_on_the_page_the_answer_comes_first_then_the_lanes_what_to_do_next_and_when_it_holds() -> None:
    result = quick_result(data=DATA)
    with_money, without = loaders_page.html(result, 2.5), loaders_page.html(result)
    shown = " ".join("".join(Content(without).texts).split())
    (answer,) = sentences(result)
    parts = (
        "Does the trainer wait for data?",
        answer.partition(". ")[0],
        "Accelerator busy: share of the time",
        "Next: loaders.build('data/shards')",
        "AMD EPYC, 8 CPUs",
        "data: data/shards (768 pictures)",
        "All numbers",
    )
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert "saves 41 of 60 min, $1.72 an hour" in with_money
    assert "saves 41 of 60 min<" in without
    assert with_money.count(">saves ") == 2
    assert "what people have today" in without
    assert 'class="lane best"><div class="name">shards (ours)' in without
    busy = loaders_page.html(quick_result(other_cpu=0.4))
    assert "Other processes took 40% of the CPUs" in busy
    assert not re.search(">saves |lane best", busy)


def test_every_chart_says_in_its_caption_what_to_see_and_the_download_is_the_result(text: str) -> None:
    content = Content(text)
    assert len(content.captions) == 7
    assert all(re.fullmatch(r"[^:]+: .+", caption) for caption in content.captions)
    (told,) = (line for line in content.texts if line.startswith("Decoding is the bottleneck"))
    assert EXPLANATION in told
    (address,) = (value for _, name, value in content.attributes if name == "href" and value[0] != "#")
    kind, _, data = address.partition(",")
    assert kind == "data:application/json;base64"
    assert Result.from_json(json.loads(base64.b64decode(data))) == rich_result()


def test_names_cannot_become_markup_and_no_network_is_needed(text: str) -> None:
    content = Content(text)
    assert HOSTILE not in text
    assert f"dali (ours, dali{HOSTILE})" in "".join(content.texts)
    harmless = json.loads(json.dumps(rich_result().to_json()).replace(json.dumps(HOSTILE)[1:-1], "harmless"))
    assert text.count("<script") == loaders_page.html(Result.from_json(harmless)).count("<script")
    own = text.replace(get_plotlyjs(), "")
    assert len(own) < len(text)
    assert not re.search(r"https?://|url\(|@import|<link", own)
    for _, name, value in content.attributes:
        assert name not in ("src", "srcset")
        assert name != "href" or value.startswith(("data:", "#"))
