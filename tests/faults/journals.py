"""An interrupted conversion whose journal is damaged, or in whose folder lie other files.

The same command ends with the bytes of an undisturbed run, or with one line; no file of the user's is lost,
none outside DST is touched. Where the journal still says what is being made, or is empty, and nothing else
lies in the folder, the same command with --overwrite, at the latest, ends with those bytes.
"""

import random
from pathlib import Path

from precache.conversion.journal import JOURNAL_NAME
from tests.faults import mutations, nursery
from tests.faults.attempts import Attempt, attempt
from tests.faults.scenarios import SCENARIOS, World, load, prepare
from tests.faults.tally import RIGHT, Outcome
from tests.faults.worlds import Belongings, contents, difference

__all__ = ["case", "load", "prepare"]
PRELOAD, CASE_S = True, 45.0
_STRAYS = (
    "mine-12345.jpg", "mine-00000.safetensors", "notes.txt", "train-00000.safetensors.bak",
    "mine-00001.jpg.partial", "folder/thesis.txt", "journal.jsonl.bak", "train-00099.tar",
)  # fmt: skip


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    scenario = SCENARIOS["resumed"]
    out, log, belongings = folder / "d/out", folder / "log", Belongings()
    scenario.lay_out(world.folder, out)
    did: list[str] = []
    header = (out / JOURNAL_NAME).read_bytes().splitlines(keepends=True)[0]
    if draw.random() < 0.9:
        did.append(_spoil(out / JOURNAL_NAME, draw, folder, belongings))
    if draw.random() < 0.3:
        victim = draw.choice([path for path in out.iterdir() if path.name != JOURNAL_NAME])
        victim.write_bytes(mutations.spoil(victim.read_bytes(), draw, b""))
        did.append(f"{victim.name} changed")
    strays = draw.sample(_STRAYS, draw.choice((1, 2))) if draw.random() < 0.4 or not did else []
    for name in strays:
        belongings.put(out / name, b"mine")
        did.append(f"{name} put into DST")
    command = scenario.command(world.folder, out)
    overwrites = draw.random() < 0.3
    nursery.say("; ".join(did))
    last = attempt([*command, *["--overwrite"] * overwrites], log)
    did.append("--overwrite" if overwrites else "resumed")
    if (bad := _judge(world, last, out, belongings)) or last.code == 0:
        return RIGHT if bad is None else Outcome(bad.kind, f"{'; '.join(did)}: {bad.detail}")
    journal = mutations.content_of(out / JOURNAL_NAME)
    if strays or journal is None or (journal and not journal.startswith(header)):
        return Outcome("clean")  # whose the files are is not known any more: the user is told
    said = last.error
    last = attempt([*command, "--overwrite"], log)
    bad = _judge(world, last, out, belongings)
    if bad is None and last.code != 0:
        bad = Outcome("loss", f"neither resumed ({said}) nor replaced: {last.error}")
    return (
        Outcome("clean")
        if bad is None
        else Outcome(bad.kind, f"{'; '.join(did)}; then --overwrite: {bad.detail}")
    )


def _judge(world: World, last: Attempt, out: Path, belongings: Belongings) -> Outcome | None:
    if lost := belongings.lost():
        return Outcome("loss", lost)
    if fault := last.fault():
        return fault
    mine = belongings.names_in(out)
    found = {name: content for name, content in contents(out).items() if name not in mine}
    if last.code == 0 and (differs := difference(found, world.truth["shards"])):
        return Outcome("wrong", differs)
    return None


def _spoil(journal: Path, draw: random.Random, folder: Path, belongings: Belongings) -> str:
    """Damage the journal, or what it names; how."""
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    way = draw.choice(("bytes", "bytes", "bytes", "json", "json", "lines", "name", "file"))
    if way == "bytes":
        journal.write_bytes(mutations.spoil(content, draw, lines[-1]))
    elif way == "json":
        journal.write_bytes(mutations.spoil_json(content, draw, lines[-1]))
    elif way == "lines":
        changed = lines
        while changed == lines:
            changed = draw.choices(lines, k=draw.randrange(len(lines) + 3))
        journal.write_bytes(b"".join(changed))
    elif way == "name":  # of a file that is not ours
        belongings.put(journal.parent.parent / "victim.safetensors", b"mine")
        names = (
            b"../victim.safetensors",
            str(journal.parent.parent / "victim.safetensors").encode(),
            b"..",
            b".",
            b"",
        )
        journal.write_bytes(
            content.replace(draw.choice((b"train-00000.safetensors", b"train-00000")), draw.choice(names))
        )
    else:
        (folder / "elsewhere").mkdir()
        if draw.random() < 0.3:
            belongings.put(folder / "elsewhere/victim", b"mine")
            journal.unlink()
            journal.symlink_to(folder / "elsewhere/victim")
            return "the journal is a link to a file of the user's"
        return f"the journal {mutations.replace_file(journal, draw, folder / 'elsewhere')}"
    return f"the journal's {way} changed"
