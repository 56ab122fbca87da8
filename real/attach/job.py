"""Job: what this process does for the job in its environment, before anything of it is known and without importing anything."""

import atexit
import os
import sys
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from real.attach.optimizers import Optimizer, Optimizers
from real.processes.attached import FOUR_LINES, NEVER_CALLED, note_attached, note_unattached

if TYPE_CHECKING:
    from real.attach.attaching import Attached
    from real.attach.ddp import DistributedDataParallel


class Job:
    """Life cycle: made as torch is imported -> ``attached`` at the first forward of a model that an optimizer may follow.

    Until then the model is torch's alone, broadcasts of buffers included. A script that calls ``fleet.init`` is left alone.
    """

    def __init__(self) -> None:
        self.optimizers = Optimizers()
        self._num_seen: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        """Optimizers that were made before a model's last forward."""
        self._attached: Attached | None = None
        self._why_not = NEVER_CALLED
        self._process = os.getpid()
        atexit.register(self._note_end)

    def before_forward(self, model: "DistributedDataParallel") -> None:
        """A forward whose gradients are wanted is about to run."""
        if self._attached is None and not self._may_attach():
            return
        num_before = self._num_seen.get(model, 0)
        optimizers = self.optimizers.holding(model) if num_before != self.optimizers.num_made else ()
        self._num_seen[model] = self.optimizers.num_made
        if not model.is_attached and not optimizers:
            return
        if self._attached is None:
            from real.attach.attaching import Attached

            self._attached = Attached()
            note_attached()
        self._attached.before_forward(model, optimizers)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's steps are the job's updates."""
        return self._attached is not None and self._attached.follows(optimizer)

    def stepped(self, _optimizer: Optimizer) -> None:
        """A step has ended in which the model came to be attached."""
        assert self._attached is not None
        self._attached.stepped()

    @property
    def attached(self) -> "Attached | None":
        """What the job does with the process's models, once it is attached."""
        return self._attached

    def _may_attach(self) -> bool:
        known = sys.modules.get("real.fleet")
        if known is None or known.fleet.job is None:
            return self._process == os.getpid()  # not a DataLoader's worker
        self._why_not = FOUR_LINES
        return False

    def _note_end(self) -> None:
        if self._attached is None and self._process == os.getpid():
            self._may_attach()
            note_unattached(self._why_not)
