"""Record a real tuning: all that its decisions depended on, in the order in which it was asked for.

``python reports/tuner/recorded.py NAME FILE [KEY=VALUE ...]`` tunes an experiment file, and
``python reports/tuner/recorded.py NAME -- COMMAND`` a script. Both write ``recorded/NAME.json``, which
``tests/tuner/test_tuner_recorded.py`` plays through today's decisions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.profile import profile_of
from fleetbench.store import commit, machine
from tuner import tune as tuning
from tuner.evidence import Pair, Run
from tuner.jobs import Script
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
from tuner.verify import verify

HERE = Path(__file__).parent
KEPT = ("verdict", "undecided", "reason", "finalist", "speedup", "low", "high", "to_target", "to_target_low", "to_target_high", "seeds")
"""Fields of a recommendation that are recorded."""


def key_of(run: Run) -> list[Any]:
    """What a request asks for, without the digests that depend on the code: arm, side, window, seed, and whether it runs to the target."""
    return [run.arm, run.side, run.leg.window, run.leg.seed, run.leg.ends_at_target]


def main() -> None:
    """Tune, and write the record."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    name, *words = sys.argv[1:]
    if words[0] == "--":
        script = Script(command=tuple(words[1:]))
        asked = Experiment.load(Path(str(resources.files("fleetbench").joinpath("script.toml"))))
    else:
        script, asked = None, Experiment.load(words[0], words[1:])
    record: dict[str, Any] = {}
    carry_out = RealRuns.carry_out

    def recording(
        experiment: Experiment, arms: list[Arm], runs: RealRuns, *rest: Any, prepare: Callable[[Arm], Arm], **named: Any
    ) -> Recommendation:
        later: list[Arm] = []
        asked_for: list[list[Any]] = []

        def prepared(arm: Arm) -> Arm:
            later.append(prepare(arm))
            return later[-1]

        def carried_out(own: RealRuns, request: Run | Pair) -> None:
            before = len(own.evidence.outcomes)
            carry_out(own, request)
            together = (request,) if isinstance(request, Run) else request.runs
            asked_for.extend([key_of(run), encode(outcome)] for run, outcome in zip(together, own.evidence.outcomes[before:], strict=False))

        begun = dataclasses.replace(runs.evidence, outcomes=(), comparisons=())
        RealRuns.carry_out = carried_out  # type: ignore[method-assign]  # what it would call
        found = verify(experiment, arms, runs, *rest, prepare=prepared, **named)
        record.update(
            {
                "commit": commit(),
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "machine": machine(),
                "busy": None if (profile := profile_of(experiment)) is None else profile.busy,
                "experiment": encode(experiment.replace(workload=dataclasses.replace(experiment.workload, profile=None))),
                "step_s": runs.step_s,
                "begun": encode(begun),
                "arms": [encode(arm) for arm in arms],
                "later": [encode(arm) for arm in later],
                "others": [[encode(strategy), ratio] for strategy, ratio in named.get("others", {}).items()],
                "asked": asked_for,
                "found": {field: getattr(found, field) for field in KEPT} | {"pairs": [encode(pair) for pair in found.pairs]},
            }
        )
        return found

    tuning.verify = recording  # type: ignore[assignment]  # what it would call
    with tempfile.TemporaryDirectory() as out:
        found, _ = tuning.tune(asked, script=script, out=Path(out))
    path = HERE / "recorded" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    print(found.line)


if __name__ == "__main__":
    main()
