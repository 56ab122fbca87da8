"""Resumption: the state of trainers that begin anew behind a step, from parameters that all of them share.

A trainer that is the same one, under the same strategy, goes on with its state as it was. Where their
number or the strategy is another, what had been begun for an agreement among the old ones is closed: a
round of Local SGD, because all start from the average; a gradient merge, whose sum nobody has any more.
"""

from __future__ import annotations

from fleetbench.plan.protocol import State, Strategy


def begin_anew(saved: State, strategy: Strategy, rank: int, *, same_strategy: bool) -> State:
    """The state behind ``saved`` of trainers under ``strategy``, which all hold the same parameters.

    Steps, epochs and a loss scale go on. With the same strategy so do updates, the K of an adaptive
    round and what it follows; under another one updates count from its own first, because what they
    count may be another number of steps.
    """
    if same_strategy:
        agreed = saved.last_sync if saved.updates == saved.origin else saved.updates
        return saved._replace(in_step=False, phase=0, merged=0, last_sync=agreed)
    fresh = strategy.init("trainer", rank, saved.next_step)
    scale = fresh.scale if fresh.scale is None or saved.scale is None else saved.scale
    return fresh._replace(phase=0, epoch=saved.epoch, epoch_ended=saved.epoch_ended, scale=scale)
