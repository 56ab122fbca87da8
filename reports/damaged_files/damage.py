"""Every file that this package writes, cut at every 64th byte and with single bits flipped: is it refused, the same, or believed?

    python reports/damaged_files/damage.py [SECONDS]     # goes on with damage.jsonl; all of it takes half an hour

Files are read as their commands read them. Refused: exit code 2, or the ``ConfigError`` behind it; ``begun anew`` is what a tuning does
with legs that it cannot read. Same: what is read equals what was written. Files that users may edit (TOML) and files of other programs
hold no digest (``foreign`` below): of these no traceback is asked, and what is believed is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from optuna.trial import Trial, TrialState

from fleetbench.cli.evaluate import read_vectors, write_vectors
from fleetbench.cli.main import main
from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.fitting.stragglers import fit_source
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.recommended import keep, text_of
from fleetbench.result import RunResult
from fleetbench.store import load_run, save_run
from fleetbench.strategy import DistributedStrategy
from sim.run import simulate
from tuner.evidence import Evidence, Outcome
from tuner.folder import Folder
from tuner.recommendation import Recommendation
from tuner.study import open_study, run_trial

HERE = Path(__file__).resolve().parent
FLIPS = 500
EVERY = 64
SEED = 14
GOOD = ("refused", "same", "begun anew")
STRATEGY = DistributedStrategy(localsgd=True, nccl_comm_num=2, sync_nccl_allreduce=False, fuse_grad_size_in_MB=4.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A file and who reads it."""

    name: str
    file: Path
    read: Callable[[], Any]
    """What stands in it. Raises ``ConfigError``."""
    foreign: bool = False
    """Written by another program, or open to edits: without a digest."""


class Anew(Exception):  # noqa: N818  # a way to end a read
    """What cannot be read is done again."""


def experiment_of(servers: int = 0, **cluster: Any) -> Experiment:
    """Three steps of two trainers."""
    layers = [{"name": "a", "params": 1000, "forward": "1 ms", "backward": "2 ms", "repeat": 2}]
    strategy = {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}} if servers else {}
    link = {"bandwidth": "1 Gbit/s", "latency": "10 us"}
    known = {"trainers_per_node": 2, "servers": servers, "intra": link, "inter": link, **cluster}
    workload = {"model": "layers", "steps": 3, "layers": layers}
    return Experiment.from_dict({"name": "damaged", "workload": workload, "cluster": known, "strategy": strategy})


def cases(folder: Path) -> Iterator[Case]:
    """All formats, written below ``folder``."""
    yield from _runs(folder / "runs")
    yield from _settings(folder / "settings")
    yield from _tunings(folder / "tunings")
    yield from _foreign(folder / "foreign")
    yield from _studies(folder / "studies")


def _runs(folder: Path) -> Iterator[Case]:
    for name, experiment in (("run", experiment_of()), ("served run", experiment_of(servers=1))):
        path = save_run(simulate(experiment, record=True), folder).path
        assert path is not None
        whole = shutil.copytree(path, folder / f"whole {name}")
        for file in sorted(path.iterdir()):
            if name == "run" or file.name.startswith("role-"):
                arguments = ["compare", str(path), str(whole), "--json"]
                yield Case(
                    f"{name}/{file.name}", file, lambda path=path, arguments=arguments: (_command(*arguments), _plain(load_run(path)))
                )


def _plain(run: RunResult) -> object:
    known = dataclasses.replace(run, path=None, steps=pd.DataFrame())
    return repr(known), run.steps.to_json(double_precision=15)


def _command(*arguments: str) -> str:
    """What a command prints. Raises ``ConfigError`` where it ends with 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    if code == 2:
        assert "error: " in err.getvalue()
        raise ConfigError(err.getvalue())
    assert code == 0, (code, err.getvalue())
    return out.getvalue()


def _simulated(path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        summary: dict[str, Any] = json.loads(_command("sim", str(path), "--json", "--out", out))
    return {key: value for key, value in summary.items() if key != "run_id"}


def _settings(folder: Path) -> Iterator[Case]:
    folder.mkdir()
    experiment_of().save(folder / "experiment.toml")
    yield Case("experiment.toml", folder / "experiment.toml", lambda: _simulated(folder / "experiment.toml"), foreign=True)
    STRATEGY.save(folder / "strategy.toml")
    yield Case("strategy.toml", folder / "strategy.toml", lambda: DistributedStrategy.load(folder / "strategy.toml"), foreign=True)
    stored = keep(folder, "0123456789abcdef", STRATEGY, "USE localsgd = true: 1.20x")
    yield Case(
        "stored recommendation", stored, lambda: DistributedStrategy.parse(text_of(folder, "0123456789abcdef"), str(stored)), foreign=True
    )
    profile_of().save(folder / "profile.toml")
    yield Case("profile.toml", folder / "profile.toml", lambda: Profile.load(folder / "profile.toml"), foreign=True)


def profile_of() -> Profile:
    """A profile of one layer."""
    gradients = (Gradient(name="fc.weight", numel=10, ready=Nanoseconds(7)),)
    layer = Layer(name="fc", gradients=gradients, forward=Nanoseconds(5), backward=Nanoseconds(9), activation_bytes=Bytes(64))
    link = Link(bandwidth=BitsPerSecond(10**10), latency=Nanoseconds(50_000))
    communication = Communication(backend="gloo", trainers=2, link=link)
    tables = (LayerTable(key="0123456789abcdef", layers=(layer,), contention=0.1),)
    return Profile(machine="a machine", created="2025-01-01", tables=tables, communication=communication)


def _vectors(path: Path) -> tuple[tuple[str, ...], bytes]:
    found = read_vectors(path)
    return tuple(found.index), found.to_numpy().tobytes()


def _tunings(folder: Path) -> Iterator[Case]:
    folder.mkdir()
    said = Recommendation(
        experiment="12345678", name="n", verdict="USE", reason="faster", strategy=STRATEGY, speedup=1.2, low=1.1, high=1.3
    )
    said.save(folder)
    yield Case("recommended.toml", folder / "recommended.toml", lambda: DistributedStrategy.load(folder / "recommended.toml"), foreign=True)
    yield Case("recommendation.json", folder / "recommendation.json", lambda: Recommendation.load(folder))

    failed = Outcome(ran="0123456789abcdef", took_s=1.5, failure=("out of memory", "rank 1", None, None))
    tuning = Folder((), experiment := experiment_of(), folder)
    tuning.begin(experiment, Evidence(before_s=3.0, outcomes=(failed,)))
    yield Case("evidence.json", tuning.path / "evidence.json", lambda: _evidence(tuning))


def _objective(trial: Trial) -> float:
    trial.suggest_categorical("thread_num", [1, 2])
    trial.set_user_attr("key", f"key {trial.number}")
    return 0.1 + trial.number / 7


def _studies(folder: Path) -> Iterator[Case]:
    folder.mkdir()
    experiment = experiment_of()
    with open_study(experiment, folder) as study:
        for number in range(4):
            study.enqueue_trial({"thread_num": number % 2 + 1}, user_attrs={"arm": f"arm {number}"})
            run_trial(study, 0, _objective)
    (journal,) = (folder / "studies").iterdir()
    written = _trials(experiment, folder)
    assert len(written) == 4
    yield Case("study.journal", journal, lambda: _trials(experiment, folder, written))


def _evidence(folder: Folder) -> Evidence:
    """What a tuning that is taken up again knows; it measures anew what it cannot read."""
    if (found := folder.evidence()) is None:
        raise Anew
    return found


def _trials(experiment: Experiment, folder: Path, written: Sequence[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Complete trials of a study, as the search reads them; in a copy, because it is written to. A trial that is gone is tried again."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(folder / "studies", Path(name) / "studies")
        with open_study(experiment, Path(name)) as study:
            complete = study.get_trials(states=(TrialState.COMPLETE,))
            found = [(trial.number, trial.params, trial.value, trial.user_attrs) for trial in complete]
    if len(found) < len(written) and all(trial in written for trial in found):
        raise Anew
    return found


def _foreign(folder: Path) -> Iterator[Case]:
    folder.mkdir()
    rows = [{"rank": rank, "step": step, "compute_s": (rank + step) / 7} for rank in range(2) for step in range(1, 9)]
    table = pd.DataFrame(rows)
    table.to_csv(folder / "trace.csv", index=False)
    table.to_parquet(folder / "trace.parquet", index=False)
    for file in sorted(folder.glob("trace.*")):
        yield Case(f"foreign/{file.name}", file, lambda file=file: fit_source(file), foreign=True)
    vectors = [(str(place), [place / 7, -place / 3]) for place in range(20)]
    own = pd.DataFrame([vector for _, vector in vectors], [name for name, _ in vectors], dtype=np.float32)
    write_vectors(folder / "v.parquet", own)
    for file in sorted(folder.glob("v.*")):
        yield Case(f"foreign/{file.name}", file, lambda file=file: _vectors(file), foreign=True)


def damages(whole: bytes, flips: int = FLIPS, every: int = EVERY) -> Iterator[tuple[str, int, bytes]]:
    """Kind, place and bytes of every damage to a file."""
    for length in range(0, len(whole), every):
        yield "cut", length, whole[:length]
    places = random.Random(SEED)  # noqa: S311  # no secret
    for bit in places.sample(range(8 * len(whole)), min(flips, 8 * len(whole))):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        yield "flip", bit, bytes(damaged)


def outcome(case: Case, right: Any) -> tuple[str, str]:
    """What became of a damaged file, and what was said where that is not good."""
    try:
        found = case.read()
    except ConfigError:
        return "refused", ""
    except Anew:
        return "begun anew", ""
    except Exception:  # noqa: BLE001  # it is what is looked for
        return "traceback", "".join(traceback.format_exc().splitlines(keepends=True)[-8:])
    return ("same", "") if found == right else ("believed", "")


def campaign(seconds: float) -> None:
    """Go on with the damages that ``damage.jsonl`` lacks, for so long."""
    begin = time.perf_counter()
    with (HERE / "damage.jsonl").open("a+", encoding="utf-8") as raw, tempfile.TemporaryDirectory() as name:
        raw.seek(0)
        done = {json.loads(line)["file"] for line in raw}
        for case in cases(Path(name)):
            if case.name in done or time.perf_counter() - begin > seconds:
                continue
            whole, right = case.file.read_bytes(), case.read()
            counts: Counter[str] = Counter()
            wrong = []
            for kind, place, damaged in damages(whole):
                case.file.write_bytes(damaged)
                ended, said = outcome(case, right)
                counts[f"{kind} {ended}"] += 1
                if ended not in GOOD:
                    wrong.append({"kind": kind, "place": place, "ended": ended, "said": said[-600:]})
            case.file.write_bytes(whole)
            assert case.read() == right
            row = {"file": case.name, "bytes": len(whole), "foreign": case.foreign, "counts": counts, "wrong": wrong}
            raw.write(json.dumps(row) + "\n")
            raw.flush()
            print(case.name, len(whole), dict(counts), f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    campaign(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))
