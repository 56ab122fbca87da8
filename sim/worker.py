"""worker: simulates what it is told on stdin, line by line, and answers on stdout; ``sim.pool`` starts it.

A line is JSON: an experiment as TOML, a profile as TOML or null, and the engine. The answer is JSON too: a summary,
or an error as its class and what ``FleetbenchError`` takes. It ends when stdin does.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
import warnings
from typing import Any

import tomli_w

from fleetbench import errors
from fleetbench.config import decode, encode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import Summary
from sim.engines import Engine
from sim.run import simulate


def question(experiment: Experiment, profile: Profile | None, engine: Engine) -> str:
    """What to ask a worker."""
    told = None if profile is None else tomli_w.dumps(encode(profile))
    return json.dumps({"experiment": experiment.to_toml(), "profile": told, "engine": engine})


def summary_of(answer: str) -> Summary:
    """A worker's summary. Raises the error that it met."""
    data = json.loads(answer)
    if "error" in data:
        name, *details = data["error"]
        kind: type[errors.FleetbenchError] = getattr(errors, name)
        raise kind(*details)
    return Summary(**{**data["summary"], "skipped": tuple(data["summary"]["skipped"])})


def simulated(experiment: Experiment, profile: Profile | None, engine: Engine) -> Summary:
    """The summary of one simulation."""
    return simulate(experiment, profile=profile, timeline=False, table=False, engine=engine).summary


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    try:
        experiment = Experiment.from_dict(tomllib.loads(asked["experiment"]))
        profile = None if asked["profile"] is None else decode(tomllib.loads(asked["profile"]), Profile, "profile")
        return {"summary": dataclasses.asdict(simulated(experiment, profile, asked["engine"]))}
    except errors.FleetbenchError as error:
        return {"error": [type(error).__name__, *error.args]}


def main() -> None:
    """Answer every line."""
    warnings.simplefilter("ignore")  # whoever asks has said them
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
