"""Engines: who executes a scenario.

- ``reference``: event by event, on SimPy's clock; every scenario.
- ``vector``: max-plus recursions over arrays of ranks, equal to the reference in every nanosecond; where durations depend on
  what overlaps, an event loop over such arrays.
- ``auto``: the vector engine, but the reference for recordings, and where an event loop is needed and trainers are few or a
  timeline is wanted.
- ``folded``: ranks that are alike as one class, equal in law only; see ``sim.vector.folded``.
- ``compiled``: parameter servers alone; see ``sim.servers.simulate``.

An execution's ``engine`` says which it was, and why it was another than was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

from fleetbench.errors import ConfigError
from sim.execution import Execution, Wanted
from sim.scenario import Scenario

Engine = Literal["auto", "reference", "vector", "folded", "compiled"]
ENGINES: tuple[str, ...] = get_args(Engine)


def execute(scenario: Scenario, wanted: Wanted, engine: Engine, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step; ``step_done`` is told how many steps are done.

    Raises ``ConfigError`` for an engine that there is not, for ranks that cannot be folded, or that are to be recorded and folded,
    and for a run that is too large for an event loop.
    """
    from sim import reference
    from sim.vector import execute as vector
    from sim.vector import folded
    from sim.vector.reach import OutOfReach

    if engine not in ENGINES:
        raise ConfigError("no such engine", "engine", repr(engine), f"one of {', '.join(ENGINES)}")
    if engine == "compiled":
        raise ConfigError('is for strategy.mode = "ps" alone', "engine", "'compiled'", 'engine = "vector" has collectives as arrays')
    if engine == "folded":
        if wanted.recordings:
            hint = 'engine = "reference" records all ranks'
            raise ConfigError("folded ranks are told nothing that could be recorded", "record", "True", hint)
        return folded.execute(scenario)
    if engine == "reference":
        return reference.execute(scenario, wanted, step_done)
    reason = "it records what every rank is told"
    if not wanted.recordings:
        try:
            return vector.execute(scenario, wanted, step_done, is_free=engine == "auto")
        except OutOfReach as found:
            reason = str(found)
    executed = reference.execute(scenario, wanted, step_done)
    return dataclasses.replace(executed, engine=f"reference: {reason}")
