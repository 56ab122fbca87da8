"""Phase: where an engine is in a step."""

from enum import Enum, auto


class Phase(Enum):
    """Where an engine is in a step, and what takes it on.

    =========== ==================== ================== ====================== ===========
    phase       a forward begins     a backward begins  the backward ends      step() ends
    =========== ==================== ================== ====================== ===========
    ``IDLE``    a step, ``FORWARD``  the same, first                           an error
    ``FORWARD``                      ``BACKWARD``                              an error
    ``BACKWARD`` an error                               ``UPDATE``             an error
    ``KEPT``    ``FORWARD``          as ``FORWARD``                            an error
    ``UPDATE``                       the step again                            ``IDLE``
    =========== ==================== ================== ====================== ===========

    A backward inside ``no_sync`` leads to ``KEPT`` instead, and one that leaves no gradient back to the phase
    before it. Under strategies that leave averages in ``.grad``, ``optimizer.step()`` may come in ``IDLE`` and
    ``FORWARD``, too, if ``.grad`` still holds the last averages.
    """

    IDLE = auto()
    """Between two steps."""
    FORWARD = auto()
    """The model's forward has begun."""
    BACKWARD = auto()
    """Gradients are computed, and exchanged bucket by bucket."""
    KEPT = auto()
    """A backward inside ``no_sync`` has left this rank's gradients in ``.grad``."""
    UPDATE = auto()
    """``.grad`` holds what the optimizer is to apply."""
