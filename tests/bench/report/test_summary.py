"""The table of five columns, its note, and the picture."""

from dataclasses import replace
from xml.etree import ElementTree

from rich.console import Console

from bench.report import picture, summary
from bench.report.result import Result
from tests.bench.report.test_gain import fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import HOSTILE, altered, around, peer, rich_result, row

ROWS = (
    fed("imagefolder", "raw tree", 0.31, cold=around(780)),
    fed("pytorch", "raw tree", 0.5),
    fed("shards", "shards", 0.99, cold=around(10_500)),
    row("synthetic", "raw tree", 90_000),
    peer("ffcv-raw", "raw pixels", 20_000),
    peer("gather", "shards", 40_000),
)


def quick_result() -> Result:
    return gain_result(*ROWS)


def test_a_loader_has_five_cells() -> None:
    titles = ["loader", "images/s", "accelerator busy", "from a cold disk", "first batch"]
    assert summary.titles(quick_result()) == titles
    assert summary.cells(quick_result()) == [
        ["imagefolder (torchvision)", "20,000", "31%", "780", "0.40 s"],
        ["pytorch (ours, raw tree)", "20,000", "50%", "not measured", "0.40 s"],
        ["shards (ours)", "20,000", "99%", "10,500", "0.40 s"],
        ["ffcv-raw on raw pixels", "20,000", "-", "not measured", "0.40 s"],
    ]


def test_a_cold_disk_has_a_column_only_where_it_was_asked_for() -> None:
    rows = (fed("imagefolder", "raw tree", 0.31), fed("shards", "shards", 0.99))
    warm = gain_result(*rows)
    assert summary.titles(warm) == ["loader", "images/s", "accelerator busy", "first batch"]
    assert summary.cells(warm)[1] == ["shards (ours)", "20,000", "99%", "0.40 s"]
    failed = replace(warm, settings={**warm.settings, "cold": True})
    assert summary.cells(failed)[1][3] == "not measured"


def test_nvjpeg_is_named_as_skipped_only_if_it_was_asked_for() -> None:
    result = replace(quick_result(), skipped={"nvjpeg on photos": "no GPU", "dali on photos": "missing"})
    assert list(summary.skipped(result)) == ["dali on photos"]
    assert list(summary.skipped(result, ["nvjpeg"])) == ["nvjpeg on photos", "dali on photos"]


def test_noise_and_the_limit_are_no_loaders_unless_they_are_all_there_is() -> None:
    noise = gain_result(row("synthetic", "raw tree", 90_000))
    assert [line[0] for line in summary.cells(noise)] == ["synthetic on raw tree"]


def test_what_people_have_today_comes_first() -> None:
    rows = (ROWS[2], peer("ffcv-raw", "raw pixels", 20_000), peer("imagefolder", "raw tree", 1_000))
    assert [line[0] for line in summary.cells(gain_result(*rows))] == [
        "imagefolder (torchvision)",
        "shards (ours)",
        "ffcv-raw on raw pixels",
    ]


def test_several_trainers_are_told_apart() -> None:
    both = gain_result(ROWS[0], altered(ROWS[0], trainer_name="resnet50"))
    assert [line[0] for line in summary.cells(both)] == [
        "imagefolder (torchvision), fed to emulated:2480",
        "imagefolder (torchvision), fed to resnet50",
    ]


def test_the_table_and_its_note_fit_into_100_columns() -> None:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(summary.terminal_table(quick_result()))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert len(lines) == 1 + 4
    assert max(map(len, [*lines, *summary.note(quick_result())])) <= 100
    assert len(summary.note(quick_result())) == 4


def test_the_note_says_what_is_not_usual() -> None:
    usual = quick_result()
    assert "shuffle" not in summary.note(usual)[1]
    other = replace(usual, settings={**usual.settings, "shuffle": "window", "augment": "train"})
    assert "augment train, shuffle window" in summary.note(other)[1]


def test_markdown_has_the_sentence_and_the_same_columns() -> None:
    text = summary.markdown(quick_result(), 2.5)
    assert text.startswith("ImageFolder and DataLoader keep")
    assert "$2.50 an hour" in text
    assert "| loader | images/s | accelerator busy | from a cold disk | first batch |" in text
    assert "| shards (ours) | 20,000 | 99% | 10,500 | 0.40 s |" in text


def test_the_picture_is_svg_with_a_bar_for_each_loader() -> None:
    drawn = picture.svg(quick_result())
    parsed = ElementTree.fromstring(drawn)
    kinds = [part.get("class") for part in parsed.iter("{http://www.w3.org/2000/svg}rect")]
    assert [kind for kind in kinds if kind in ("bar", "today")] == ["today", "bar", "bar"]
    texts = [part.text for part in parsed.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "How busy each loader keeps an accelerator of 2,480 images/s"
    assert {"31%", "50%", "99%"} <= set(texts)
    assert "prefers-color-scheme: dark" in drawn


def test_the_picture_of_loaders_alone_is_of_images_per_second_warm_and_cold() -> None:
    alone = {"trainer_name": "none", "trainer": None, "together": None, "ratio": None}
    parsed = ElementTree.fromstring(picture.svg(gain_result(*(altered(r, **alone) for r in ROWS))))
    texts = [part.text for part in parsed.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "Images per second of each loader, and read from a cold disk"
    assert {"20,000", "780 cold", "10,500 cold"} <= set(texts)
    cold = [part for part in parsed.iter("{http://www.w3.org/2000/svg}rect") if part.get("class") == "cold"]
    assert len(cold) == 2


def test_names_cannot_become_markup_in_the_picture() -> None:
    drawn = picture.svg(rich_result())
    assert HOSTILE not in drawn
    ElementTree.fromstring(drawn)
