"""Phase: where an ``Engine`` is in a step; a ``ShardedEngine`` uses the same names, except ``BACKWARD``."""

from enum import Enum, auto


class Phase(Enum):
    """Where an engine is in a step, and which events lead to the next phase.

    ============ ====================== ========================== ================= ===========
    phase        a forward begins       a backward begins          the backward ends step() ends
    ============ ====================== ========================== ================= ===========
    ``IDLE``     new step, ``FORWARD``  new step, ``BACKWARD``                       an error
    ``FORWARD``                         ``BACKWARD``                                 an error
    ``BACKWARD`` an error                                          ``UPDATE``        an error
    ``KEPT``     ``FORWARD``            ``BACKWARD``                                 an error
    ``UPDATE``                          same step, ``BACKWARD``                      ``IDLE``
    ============ ====================== ========================== ================= ===========

    A backward inside ``no_sync`` leads to ``KEPT`` instead, and one that leaves no gradient leads back to the phase
    before it. Under strategies that leave averages in ``.grad``, ``optimizer.step()`` may also come in ``IDLE`` and
    ``FORWARD``, if ``.grad`` still holds the last averages.
    """

    IDLE = auto()
    """Between two steps."""
    FORWARD = auto()
    """The model's forward has begun."""
    BACKWARD = auto()
    """Gradients are being computed, and exchanged bucket by bucket."""
    KEPT = auto()
    """A backward inside ``no_sync`` has left this rank's gradients in ``.grad``."""
    UPDATE = auto()
    """A backward has ended, and ``.grad`` holds what the optimizer is to apply."""
