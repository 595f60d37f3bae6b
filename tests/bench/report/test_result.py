"""A result made by hand, as JSON, as the terminal shows it and as its page does, without a browser."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from bench.report import loaders_page
from bench.report.result import COLUMNS, Showing, show, table
from bench.report.row import Result, read_result
from bench.report.verdict import sentences
from precache.errors import SettingError
from tests.bench.report.test_gain import fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import EXPLANATION, HOSTILE, around, peer, rich_result, row
from tests.command import ROOT

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


KEPT = [path for path in (ROOT / "bench/results").glob("*.json") if not path.name.startswith("gpu-")]


def written(result: Result) -> Any:
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


def test_a_result_with_everything_and_those_that_documents_show_survive_json() -> None:
    assert KEPT
    for result in (rich_result(), *map(read_result, KEPT)):
        assert Result.from_json(written(result)) == result


def test_a_value_of_another_type_is_refused_in_one_line() -> None:
    for field, other in (("backend", 3), ("loader", "x"), ("wait_s", {}), ("monitor", [None])):
        content = written(rich_result())
        content["rows"][0][field] = other
        with pytest.raises(SettingError, match=r"^not a result of 'bench loaders' \(.*\)$"):
            Result.from_json(content)


def test_a_newcomer_sees_the_answer_five_columns_and_what_people_have_today_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    details = table(rich_result(), details=True)
    assert set(details.titles) == {"loader", *(column.title for column in COLUMNS)}
    assert len(details.rows) == len(rich_result().rows)
    for is_whole in (True, False):
        show(quick_result(), Showing(details=is_whole, gpu_price=2.5))
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 100 for line in lines)
        assert lines[0].startswith("ImageFolder and DataLoader keep an emulated accelerator")


class Content(HTMLParser):
    """A page's texts and attributes; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
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
        if self._open[-1:] not in (["style"], ["script"]):
            self.texts.append(data)


def test_on_the_page_the_answer_comes_first_then_the_lanes_what_to_do_next_and_when_it_holds() -> None:
    result = quick_result(data=DATA)
    page = loaders_page.html(result, 2.5)
    shown = " ".join("".join(Content(page).texts).split())
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
    assert "saves 41 of 60 min, $1.72 an hour" in page
    assert page.count(">saves ") == 2
    assert 'class="lane best"><div class="name">shards (ours)' in page
    assert not re.search(">saves |lane best", loaders_page.html(quick_result(other_cpu=0.4)))


def test_charts_have_captions_the_download_is_the_result_names_are_no_markup_and_nothing_is_fetched() -> None:
    text = loaders_page.html(rich_result())
    content = Content(text)
    assert text.count("<figcaption>") == 7
    (told,) = (line for line in content.texts if line.startswith("Decoding is the bottleneck"))
    assert EXPLANATION in told
    (address,) = (value for _, name, value in content.attributes if name == "href" and value[0] != "#")
    kind, _, data = address.partition(",")
    assert kind == "data:application/json;base64"
    assert Result.from_json(json.loads(base64.b64decode(data))) == rich_result()
    assert HOSTILE not in text
    assert f"dali (ours, dali{HOSTILE})" in "".join(content.texts)
    assert not re.search(r"https?://|url\(|@import|<link", text.replace(get_plotlyjs(), ""))
    for _, name, value in content.attributes:
        assert name not in ("src", "srcset")
        assert name != "href" or value.startswith(("data:", "#"))
