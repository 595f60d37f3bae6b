"""An interrupted conversion whose journal is damaged, or in whose folder lie other files.

The same command ends with the bytes of an undisturbed run, or with one line; no file of the user's is lost,
none outside DST is touched. Where the journal still says what is being made, or is empty, and nothing else
lies in the folder, the same command with --overwrite, at the latest, ends with those bytes.
"""

import random
from pathlib import Path

from precache.conversion.journal import JOURNAL_NAME
from tests.faults import mutations, nursery
from tests.faults.scenarios import SCENARIOS, Siege, World, load, prepare
from tests.faults.tally import Outcome
from tests.faults.worlds import Belongings

__all__ = ["case", "load", "prepare"]
PRELOAD, CASE_S = True, 45.0
_STRAYS = (
    "mine-12345.jpg", "mine-00000.safetensors", "notes.txt", "train-00000.safetensors.bak",
    "mine-00001.jpg.partial", "folder/thesis.txt", "journal.jsonl.bak", "train-00099.tar",
)  # fmt: skip


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    siege = Siege(world, SCENARIOS["resumed"], folder)
    path = siege.out / JOURNAL_NAME
    header = path.read_bytes().splitlines(keepends=True)[0]
    if draw.random() < 0.9:
        siege.did.append(_spoil(path, draw, folder, siege.belongings))
    if draw.random() < 0.3:
        victim = draw.choice([other for other in siege.out.iterdir() if other.name != JOURNAL_NAME])
        victim.write_bytes(mutations.spoil(victim.read_bytes(), draw, b""))
        siege.did.append(f"{victim.name} changed")
    strays = draw.sample(_STRAYS, draw.choice((1, 2))) if draw.random() < 0.4 or len(siege.did) == 1 else []
    for name in strays:
        siege.belongings.put(siege.out / name, b"mine")
        siege.did.append(f"{name} put into DST")
    overwrites = draw.random() < 0.3
    nursery.say("; ".join(siege.did))
    first = siege.attempt(*["--overwrite"] * overwrites)
    siege.did.append("--overwrite" if overwrites else "resumed")
    if (bad := siege.judge(first)) or first.code == 0:
        return siege.outcome(bad)
    journal = mutations.content_of(path)
    if strays or journal is None or (journal and not journal.startswith(header)):
        return Outcome("clean")  # whose the files are is not known any more: the user is told
    last = siege.attempt("--overwrite")
    siege.did.append("then --overwrite")
    bad = siege.judge(last)
    if bad is None and last.code != 0:
        bad = Outcome("loss", f"neither resumed ({first.error}) nor replaced: {last.error}")
    return siege.outcome(bad, Outcome("clean"))


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
        victim = journal.parent.parent / "victim.safetensors"
        belongings.put(victim, b"mine")
        names = (b"../victim.safetensors", str(victim).encode(), b"..", b".", b"")
        named = draw.choice((b"train-00000.safetensors", b"train-00000"))
        journal.write_bytes(content.replace(named, draw.choice(names)))
    else:
        (folder / "elsewhere").mkdir()
        if draw.random() < 0.3:
            belongings.put(folder / "elsewhere/victim", b"mine")
            journal.unlink()
            journal.symlink_to(folder / "elsewhere/victim")
            return "the journal is a link to a file of the user's"
        return f"the journal {mutations.replace_file(journal, draw, folder / 'elsewhere')}"
    return f"the journal's {way} changed"
