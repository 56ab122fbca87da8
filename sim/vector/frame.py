"""Frame: the table of steps, made from arrays; equal to ``fleetbench.result.steps_table`` of the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fleetbench.result import COLUMNS
from sim.vector.groups import NEVER, Times
from sim.vector.lanes import Seen
from sim.vector.sights import waits

_SECOND = 1e9
_FIELDS = ("start", "forward", "backward", "wait", "stall", "update", "end", "arrival")


class Frame:
    """Keeps what every rank saw of every step."""

    def __init__(self, num_ranks: int, steps: range) -> None:
        self._steps = steps
        self._kept = {name: np.zeros((len(steps), num_ranks), dtype=np.int64) for name in _FIELDS}

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``sim.vector.engine.Sight``."""
        count = len(steps)
        kept = self._kept
        kept["start"][steps] = seen.start[:count] + begins
        kept["end"][steps] = seen.end[:count] + begins
        kept["forward"][steps] = seen.forward[:count]
        kept["backward"][steps] = seen.compute_end[:count] - seen.head_end[:count] - seen.forward[:count]
        kept["wait"][steps] = waits(seen, count)
        kept["stall"][steps] = seen.stall[:count]
        kept["update"][steps] = seen.update[:count]
        if seen.arrival is None:
            kept["arrival"][steps] = NEVER
        else:
            arrival = seen.arrival[:count]
            kept["arrival"][steps] = np.where(arrival == NEVER, NEVER, arrival + begins)

    def table(self, local_steps: Sequence[int | None], losses: Sequence[float | None], bytes_sent: Times) -> pd.DataFrame:
        """One row a rank and step; ``bytes_sent`` has shape ``(num_steps, num_ranks)``, the others one entry a step."""
        num_steps, ranks = self._kept["start"].shape
        flat = {name: np.ascontiguousarray(values.T).ravel() for name, values in self._kept.items()}
        known = flat["forward"] + flat["backward"] + flat["stall"] + flat["update"]
        arrival = np.where(flat["arrival"] == NEVER, np.nan, flat["arrival"] / _SECOND)
        lengths = pd.array([pd.NA if length is None else length for length in local_steps], dtype="Int64")
        table = pd.DataFrame(
            {
                "rank": np.repeat(np.arange(ranks, dtype=np.int64), num_steps),
                "step": np.tile(np.asarray(self._steps, dtype=np.int64), ranks),
                "start_s": flat["start"] / _SECOND,
                "forward_s": flat["forward"] / _SECOND,
                "backward_s": flat["backward"] / _SECOND,
                "wait_s": flat["wait"] / _SECOND,
                "exposed_comm_s": (flat["stall"] - flat["wait"]) / _SECOND,
                "update_s": flat["update"] / _SECOND,
                "other_s": (flat["end"] - flat["start"] - known) / _SECOND,
                "arrival_s": arrival,
                "local_steps": lengths.take(np.tile(np.arange(num_steps), ranks)),
                "loss": np.tile(np.asarray([np.nan if loss is None else loss for loss in losses]), ranks),
                "bytes_sent": np.ascontiguousarray(np.broadcast_to(bytes_sent, (num_steps, ranks)).T).ravel(),
            }
        )
        return table[list(COLUMNS)]
