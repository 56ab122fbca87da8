"""Saves in which a rank is killed, wherever that may be: what is loaded next is the old save or the new one, whole, on every rank."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import run_scripts

SCRIPT = Path(__file__).with_name("killed_saves.py")

WHOLE = {"fsync": 7, "torn": 3, "replace": 1, "rmtree": 1, "mkdir": 4}
"""At least so often a rank that writes a whole checkpoint touches the disk."""
ALONE = {"fsync": 1, "torn": 1, "replace": 0, "rmtree": 0, "mkdir": 1}
"""And one that writes only what it has of its own."""
FEW = ("torn", "replace")


def trainings(tmp_path: Path, ranks: int, places: Sequence[str]) -> list[dict[str, Any]]:
    """What came of every training, in order."""
    output = tmp_path / "found.json"
    run_scripts([SCRIPT, str(ranks), tmp_path, output, *places], tmp_path, {}, timeout_s=580)
    found: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        pytest.param(2, FEW, id="2 ranks, torn files"),
        pytest.param(2, tuple(WHOLE), id="2 ranks", marks=pytest.mark.whole),
        pytest.param(3, FEW, id="3 ranks, torn files", marks=pytest.mark.slow),
        pytest.param(3, tuple(WHOLE), id="3 ranks", marks=pytest.mark.whole),
    ],
)
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path, ranks: int, places: Sequence[str]) -> None:
    """Every training goes on, bit for bit, after the step of the last save, or of that in which a rank was killed.

    The one kills itself where it was told; the others end with an error that says so, or have done their part. Where
    a save returned on any rank, that save, or a later one, is what is loaded.
    """
    found = trainings(tmp_path, ranks, places)
    killed: dict[int, dict[str, int]] = {}
    for before, after in itertools.pairwise(found):
        (loaded,), saved = set(map(int, after["loaded"])), max(map(int, before["saved"]))
        assert saved <= loaded <= int(before["loaded"][0]) + 2, (before, after)
    for training in found:
        place = f"rank {training['victim']} before {training['place']} {training['number']}: {training['rank']}"
        count = killed.setdefault(training["victim"], {}).setdefault(training["place"], 0)
        assert all("other bits" not in text for text in training["rank"]), place
        if training["ended"][training["victim"]] == 0:
            assert training["ended"] == [0] * ranks, place
            continue
        killed[training["victim"]][training["place"]] = count + 1
        for rank, code in enumerate(training["ended"]):
            assert code == (-signal.SIGKILL if rank == training["victim"] else code), place
            assert code in (-signal.SIGKILL, 0, 1), place
            assert code != 1 or "CollectiveFailed" in training["rank"][rank] or "not every trainer came" in training["rank"][rank], place
    for victim in range(ranks):
        least = WHOLE if victim == 0 else ALONE
        assert all(killed[victim][place] >= least[place] for place in places), killed
    assert len(list((tmp_path / "checkpoint").glob("save-*"))) == 1, "the last save was not struck, and has cleared up"
