"""A result of `bench accuracy` on the terminal and as a page."""

from typing import Any

import pytest

from bench.report import accuracy_page as page
from tests.bench.rich_result import HOSTILE


def line(arm: str, seed: int, top1: float, **more: Any) -> dict[str, Any]:
    recipe = {"model": "resnet10", "size": 64, "epochs": 2, "batch_size": 64, "lr": 0.2, "amp": "bf16"}
    machine = {"date": "2026-11-22", "cpu": "Xeon, 2 CPUs", "memory": "24 GiB", "accelerator": "none"}
    told = {
        "arm": arm,
        "seed": seed,
        "conditions": {**recipe, "workers": 2, "threads": 1},
        "source": {"described": f"shards on {arm}"},
        "machine": machine,
        "curve": [[1, top1 / 2, 10.0], [2, top1, 20.0]],
        "train_s": 20.0,
        "energy_j": None,
        "other_cpu": 0.01,
        "steps": 94,
    }
    return {**told, **more}


def lines(name: str = "crop", **more: Any) -> list[dict[str, Any]]:
    baseline = [line("imagefolder", seed, 60 + seed / 10, train_s=50.0, **more) for seed in range(3)]
    return [*baseline, *(line(name, seed, 60.2 - seed / 10, **more) for seed in range(3))]


def test_the_answer_comes_first_then_the_table_then_the_conditions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page.show(lines(), 1.0)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("A model trained on crop is as good as on imagefolder, within ±0.50 points")
    table = [" ".join(text.split()) for text in said]
    assert "pictures from top-1 difference 95% interval verdict training to 60%" in table
    assert "imagefolder 60.10% ± 0.10 - - - 50 s (1.00x) 20.0 s" in table
    assert "crop 60.10% ± 0.10 +0.00 -0.50 to +0.50 same 20 s (0.40x) 20.0 s" in table
    assert any(text.startswith("resnet10, 64x64; 2 epochs of batches of 64; 94 steps") for text in said)
    assert max(map(len, said)) <= 110


def test_energy_is_a_column_where_it_is_known() -> None:
    known = lines(energy_j=2500.0)
    assert page.titles(known)[-1] == "energy"
    assert [cells[-1] for cells in page.rows(known, 1.0)] == ["2.5 kJ", "2.5 kJ"]
    assert {len(cells) for cells in page.rows(lines(), 1.0)} == {len(page.titles(lines()))}


def test_times_beside_other_programs_are_not_relied_on() -> None:
    assert "Other processes took 40% of the CPUs" in page.answers(lines(other_cpu=0.4), 1.0)[-1]
    assert "accuracy does not depend on that" in page.answers(lines(other_cpu=0.4), 1.0)[-1]
    assert len(page.answers(lines(), 1.0)) == 1


def test_the_page_has_the_curves_of_all_seeds_and_escapes_names() -> None:
    drawn = page.html(lines(HOSTILE), 1.0)
    assert HOSTILE not in drawn
    assert "Does the model get worse?" in drawn
    figure = page._curves(lines(), 0, "epochs")
    assert len(figure.data) == 2 * (3 + 1)  # each seed, and the mean
    assert [trace.name for trace in figure.data if trace.name] == ["imagefolder", "crop"]
    assert drawn.count("60.20%") == 2  # every training is in the folded table


def test_models_that_learnt_nothing_are_not_called_as_good() -> None:
    answers = page.answers(lines(classes=3), 1.0)
    assert answers[0].startswith(
        "Nothing can be told: models trained on imagefolder reach 60.1%, and guessing"
    )
    assert len(answers) == 1
    assert len(page.answers(lines(classes=102), 1.0)) == 1
    assert "is as good as" in page.answers(lines(classes=102), 1.0)[0]


def test_one_seed_has_a_page_too() -> None:
    alone = [each for each in lines() if each["seed"] == 0]
    assert "Cannot tell with 1 seed" in page.html(alone, 1.0)
