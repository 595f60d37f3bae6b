"""Result of trials made by hand: its file, its text on the terminal, and its page."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from plotly.offline import get_plotlyjs

from bench.commands.output import show
from bench.report import loaders
from bench.report.page import make_page
from bench.report.result import Result, Trial, format_document, parse_document
from bench.report.stats import Estimate
from bench.report.table import COLUMNS, make_table
from precache.errors import SettingError
from tests.bench.results import (
    HOSTILE,
    MACHINE,
    SPIKES,
    make_rich_trials,
    make_settings,
    make_shared_trials,
    make_trials,
    rich_result,
)


def remake(text: str) -> Result:
    """Make the result again from the trials in a file."""
    document = parse_document(text.encode(), "r.json")
    return loaders.make_result(document.machine, document.settings, document.trials, document.skipped)


def test_result_can_be_made_again_from_its_file() -> None:
    result = rich_result()
    text = format_document(result.to_json())
    again = remake(text)
    assert format_document(remake(format_document(again.to_json())).to_json()) == format_document(
        again.to_json()
    )
    assert [row.name for row in again.rows] == [row.name for row in result.rows]
    assert again.answer == result.answer
    lines = text.splitlines()
    assert sum(line.startswith('  {"key"') for line in lines) == len(result.trials), "a line for each trial"


def test_order_of_trials_does_not_matter() -> None:
    trials = make_rich_trials()
    result = rich_result()
    back = loaders.make_result(result.machine, result.settings, trials[::-1], result.skipped)
    values = {row.name: row.values for row in result.rows}
    assert {row.name: row.values for row in back.rows} == values


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("trials"),
        lambda content: content.update(version=99),
        lambda content: content["trials"][0].update(key=3),
        lambda content: content["trials"][0].update(numbers={"images_per_s": "x"}),
        lambda content: content["trials"][0].update(series={"wait_s": 1}),
        lambda content: content.update(machine=None),
    ],
)
def test_file_of_something_else_is_refused(change: Any) -> None:
    content = json.loads(format_document(rich_result().to_json()))
    change(content)
    with pytest.raises(SettingError) as raised:
        parse_document(json.dumps(content).encode(), "r.json")
    assert raised.value.path == "r.json"
    assert "--json" in raised.value.remedy


def test_file_that_is_not_json_is_refused() -> None:
    with pytest.raises(SettingError) as raised:
        parse_document(b"{", "r.json")
    assert raised.value.path == "r.json"
    assert "--json" in raised.value.remedy


def test_trial_survives_json() -> None:
    for trial in make_rich_trials():
        again = msgspec.json.decode(msgspec.json.encode(trial.rounded()), type=Trial)
        assert again == trial.rounded()
        assert again.key == trial.key
        assert again.numbers == pytest.approx(trial.numbers, rel=1e-5)
        assert (again.activity is None) == (trial.activity is None)


def test_table_has_five_columns_and_todays_loader_first() -> None:
    table = make_table(rich_result())
    assert table.titles == ["loader", "images/s", "accelerator busy", "from a cold disk", "first batch"]
    assert [row[:3] for row in table.rows] == [
        ["imagefolder (torchvision)", "780", "31%"],
        ["pytorch (ours, raw tree)", "1,150", "44%"],
        ["shards (ours)", "24,000", "99%"],
        [f"dali (ours, dali{HOSTILE})", "2,300", "91%"],
    ]
    assert [table.rows[at][0] for at in table.bold] == ["shards (ours)"]
    text = " ".join(make_table(rich_result()).markdown().split())
    assert "| shards (ours) | 24,000 | 99% |" in text


def test_busy_machine_has_no_best_row() -> None:
    assert list(make_table(rich_result(other_cpu=0.4)).bold) == []


def test_details_have_every_row() -> None:
    details = make_table(rich_result(), details=True)
    assert len(details.rows) == len(rich_result().rows)
    assert set(details.titles) <= {"loader", *(column.title for column in COLUMNS.values())}


def test_terminal_lines_fit_and_begin_with_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for details in (True, False):
        show(rich_result(gpu_price=2.5), details=details)
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 100 for line in lines if HOSTILE not in line)
        assert lines[0].startswith("ImageFolder and DataLoader keep an emulated accelerator")


class Content(HTMLParser):
    """Parser of a page's texts and attributes, which checks that elements are closed in order."""

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


def test_page_has_answer_bars_next_step_and_conditions_in_order() -> None:
    result = rich_result(gpu_price=2.5)
    page = make_page(result)
    shown = " ".join("".join(Content(page).texts).split())
    parts = (
        "Does the trainer wait for data?",
        result.answer[0][0],
        "Accelerator busy, while the loader feeds it",
        "Next: loaders.build('data/shards')",
        "AMD EPYC, 8 CPUs",
        "data: photos (30,607 pictures)",
        "All numbers",
    )
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert "saves 41 of 60 min, $1.72 an hour" in page
    assert 'class="lane today"><div class="name">imagefolder (torchvision)' in page
    assert 'class="lane best"><div class="name">shards (ours)' in page
    assert not re.search(">saves |lane best", make_page(rich_result(other_cpu=0.4)))


def test_page_holds_the_result_and_needs_no_network() -> None:
    text = make_page(rich_result())
    content = Content(text)
    assert text.count("<figcaption>") > 7
    (finding,) = (line for line in content.texts if SPIKES in line)
    assert "the bottleneck" in finding
    (address,) = (value for _, name, value in content.attributes if name == "href" and value[0] != "#")
    kind, _, data = address.partition(",")
    assert kind == "data:application/json;base64"
    again = remake(base64.b64decode(data).decode())
    assert again.answer == rich_result().answer
    assert HOSTILE not in text
    assert f"dali (ours, dali{HOSTILE})" in "".join(content.texts)
    assert not re.search(r"https?://|url\(|@import|<link", text.replace(get_plotlyjs(), ""))
    for _, name, value in content.attributes:
        assert name not in ("src", "srcset")
        assert name != "href" or value.startswith(("data:", "#"))


def make(trials: list[Trial], **settings: Any) -> Result:
    return loaders.make_result(MACHINE, make_settings(cold=False, **settings), trials, {})


def test_one_run_names_no_winner_and_recommends_nothing() -> None:
    once = [trial for trial in make_rich_trials() if trial.key["repeat"] == 0]
    result = make(once)
    assert (result.best, result.next_step) == ((), "")
    assert "One run of each names no winner" in " ".join(result.answer[0])
    assert "one run each" in " ".join(result.conditions)


def test_table_shows_launching_beside_the_loader_and_as_a_limit() -> None:
    trials = make_trials("imagefolder", "photos", 780, 769) + make_shared_trials()
    for trial in trials:
        if trial.key["kind"] in ("fed", "trainer"):
            longer = 1.5 if trial.key["kind"] == "fed" else 1.0
            trial.series["step_s"] = (0.020 * longer,) * 8
            trial.series["launch_s"] = tuple(0.020 * longer for _ in range(8))
    result = loaders.make_result(MACHINE, make_settings(launches=1000, cold=False), trials, {})
    (row,) = result.rows
    assert row.values["launch_ratio"] == row.values["launch_p95_ratio"] == Estimate(1.5, 1.5, 1.5)
    assert "Launching limits this trainer to 2,480 images/s." in result.answer[0]
    assert "with 1,000 launches a step (2,480 images/s)" in " ".join(result.conditions)
    table = make_table(result)
    assert table.titles[3:5] == ["launching", "launching 95%"]
    assert table.rows[0][3:5] == ["1.50x", "1.50x"]


def test_loader_with_the_fewest_repeats_decides() -> None:
    """A file may be continued with fewer repeats for another folder."""
    shared, tree = make_shared_trials(), make_trials("imagefolder", "photos", 780, 769)
    shards = make_trials("shards", "data/shards", 24_000, 2_455)
    first_run = [trial for trial in shards if trial.key["repeat"] == 0]
    result = make([*shared, *tree, *first_run])
    assert result.best == ()
    assert "one run each" in " ".join(result.conditions)


def test_next_step_names_a_backend_that_is_not_the_default() -> None:
    trials = make_shared_trials() + make_trials("imagefolder", "photos", 780, 769)
    assert make(trials + make_trials("dali", "photos", 2_300, 2_250)).next_step.startswith(
        "Next: loaders.build('photos', backend='dali')"
    )
    assert make(trials + make_trials("pytorch", "photos", 2_300, 2_250)).next_step.startswith(
        "Next: loaders.build('photos') "
    )


def test_folders_of_one_kind_are_told_apart_by_their_names() -> None:
    data = {f"data/{name}": {"kind": "shards", "samples": 9, "digest": name} for name in "ab"}
    data |= {name: {"kind": "raw", "samples": 9, "digest": name} for name in ("photos", "more")}
    trials = make_shared_trials()
    for backend, folder, rate in (
        ("imagefolder", "photos", 700),
        ("pytorch", "more", 1_500),
        ("shards", "data/a", 2_400),
        ("shards", "data/b", 1_000),
    ):
        trials += make_trials(backend, folder, rate * 2, rate)
    result = make(trials, data=data)
    assert [row.key["data"] for row in result.rows] == [
        "raw tree photos",
        "raw tree more",
        "shards a",
        "shards b",
    ]
    assert result.next_step.startswith("Next: loaders.build('data/a')")
    assert "Replace them by `loaders.build`" in " ".join(result.answer[0])
