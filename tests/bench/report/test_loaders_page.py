"""The page of a result and its picture, without a browser."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from bench.report import loaders_page
from bench.report.row import Result
from bench.report.verdict import sentences
from tests.bench.report.test_gain import fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import (
    EXPLANATION,
    HOSTILE,
    peer,
    rich_result,
)


class Content(HTMLParser):
    """A page's texts, captions, folded titles and attributes; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.captions: list[str] = []
        self.folded: list[str] = []
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
        if inside in (["figcaption"], ["summary"]):
            (self.captions if inside == ["figcaption"] else self.folded).append(data)
        if inside not in (["style"], ["script"]):
            self.texts.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return loaders_page.html(rich_result())


@pytest.fixture(scope="module")
def content(text: str) -> Content:
    return Content(text)


def quick_result(**settings: Any) -> Result:
    """As of `bench quickstart`."""
    data = {"shards on shards": {"samples": 768, "digest": "0", "path": "data/shards"}}
    rows = (
        fed("imagefolder", "raw tree", 0.31),
        fed("pytorch", "raw tree", 0.5),
        fed("shards", "shards", 0.99),
        fed("webdataset", "webdataset", 0.31),
        fed("dali", "dali", 0.2),
        peer("ffcv-raw", "raw pixels", 20_000),
    )
    return gain_result(*rows, **{"data": data, **settings})


def test_the_answer_comes_first_then_the_lanes_what_to_do_next_and_when_it_holds() -> None:
    shown = " ".join("".join(Content(loaders_page.html(quick_result())).texts).split())
    (answer,) = sentences(quick_result())
    places = [
        shown.index(part)
        for part in (
            "Does the trainer wait for data?",
            answer.partition(". ")[0],
            "Accelerator busy: share of the time",
            "Next: loaders.build('data/shards')",
            "AMD EPYC, 8 CPUs",
            "data: data/shards (768 pictures)",
            "All numbers",
        )
    ]
    assert places == sorted(places)


def test_every_chart_says_in_its_caption_what_to_see(content: Content) -> None:
    assert len(content.captions) == 7
    assert all(re.fullmatch(r"[^:]+: .+", caption) for caption in content.captions)
    (told,) = (line for line in content.texts if line.startswith("Decoding is the bottleneck"))
    assert EXPLANATION in told
    assert "24.7 GB/s" in content.texts


def test_names_cannot_become_markup(text: str, content: Content) -> None:
    assert HOSTILE not in text
    assert f"dali (ours, dali{HOSTILE})" in "".join(content.texts)
    harmless = json.loads(json.dumps(rich_result().to_json()).replace(json.dumps(HOSTILE)[1:-1], "harmless"))
    assert text.count("<script") == loaders_page.html(Result.from_json(harmless)).count("<script")


def test_it_needs_no_network(text: str, content: Content) -> None:
    own = text.replace(get_plotlyjs(), "")
    assert len(own) < len(text)
    assert not re.search(r"https?://|url\(|@import|<link", own)
    for _, name, value in content.attributes:
        assert name not in ("src", "srcset")
        assert name != "href" or value.startswith(("data:", "#"))


def test_the_download_is_the_result(content: Content) -> None:
    (address,) = (value for _, name, value in content.attributes if name == "href" and value[0] != "#")
    kind, _, data = address.partition(",")
    assert kind == "data:application/json;base64"
    assert ("a", "download", "result.json") in content.attributes
    assert Result.from_json(json.loads(base64.b64decode(data))) == rich_result()


def test_each_loader_says_what_it_saves_of_an_hour() -> None:
    with_money, without = loaders_page.html(quick_result(), 2.5), loaders_page.html(quick_result())
    assert "saves 41 of 60 min, $1.72 an hour" in with_money
    assert "saves 41 of 60 min<" in without
    assert with_money.count(">saves ") == 2
    for said in ("what people have today", "as today, within noise", "slower than today"):
        assert said in without
    assert 'class="lane best"><div class="name">shards (ours)' in without
    busy = loaders_page.html(quick_result(other_cpu=0.4))
    assert "Other processes took 40% of the CPUs" in busy
    assert ">saves " not in busy
    assert "lane best" not in busy
