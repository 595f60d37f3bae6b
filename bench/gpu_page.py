"""Page of the results of `bench/gpu.sh`: for each step its answer, its table and a link to its file.

python -m bench.gpu_page FOLDER [STEP-WITHOUT-A-RESULT ...]
"""

import sys
from html import escape
from pathlib import Path

from bench.commands.report import read_result
from bench.report.page import STYLE, draw_summary
from bench.report.table import make_table
from precache import page
from precache.errors import SettingError

TITLE = "Does the GPU wait for data?"


def make_page(folder: Path, without_result: list[str]) -> str:
    """Return HTML of the results in the folder, in the order in which they were measured.

    Args:
        folder: holds STEP.json for each step with a result, and tests.txt, what pytest printed.
        without_result: names of steps that have no result yet.
    """
    parts = [f"<h1>{TITLE}</h1>"]
    if without_result:
        parts.append(page.paragraphs([f"Not measured yet: {', '.join(without_result)}."]))
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        parts.append(f"<h2>{escape(path.stem)}</h2>")
        try:
            parts.append(_draw_step(path))
        except SettingError as error:
            parts.append(page.paragraphs([str(error)]))
    tests = folder / "tests.txt"
    if tests.exists():
        parts.append(f"<h2>tests</h2>{page.paragraphs(tests.read_text().splitlines()[-1:])}")
    return page.document(TITLE, "".join(parts), style=STYLE)


def _draw_step(path: Path) -> str:
    """Return HTML of one result: answer, a bar for each loader, table, conditions, link to the file."""
    result = read_result(path)
    skipped = [f"Skipped {name}: {reason}." for name, reason in result.skipped.items()]
    if result.settings.get("device") == "cpu":
        skipped.append("In miniature on a CPU: no figure here says anything about a GPU.")
    notes = "<br>".join(map(escape, [*skipped, *result.conditions]))
    name = escape(path.name)
    return (
        f"{draw_summary(result)}{make_table(result, details=False).html()}"
        f'<p class="note">{notes}</p>'
        f'<p><a href="{name}">{name}</a>; <code>bench report {name} --html {escape(path.stem)}.html</code> '
        "draws it.</p>"
    )


if __name__ == "__main__":
    results = Path(sys.argv[1])
    page.write(results / "page.html", make_page(results, sys.argv[2:]))
