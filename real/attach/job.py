"""Job: this process's part in the job that its environment asks for. Importing it imports nothing of torch."""

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
    from real.attach.sharded import Sharded


class Job:
    """This process's part in the job, before and after it attaches.

    Life cycle: created when torch is imported -> ``attached`` at the first forward of a model that an
    optimizer may follow. Until then the model is purely torch's, broadcasts of buffers included. A script
    that calls ``fleet.init`` is left alone.
    """

    def __init__(self) -> None:
        self.optimizers = Optimizers()
        self._num_seen: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        """Number of optimizers that had been created at each model's last forward."""
        self._attached: Attached | None = None
        self.sharded: Sharded | None = None
        """Part of the job for models of ``fully_shard``; ``None`` until that is imported."""
        self._why_not = NEVER_CALLED
        self._process = os.getpid()
        atexit.register(self._note_end)

    def before_forward(self, model: "DistributedDataParallel") -> None:
        """Attach a model whose parameters an optimizer holds, before a forward with gradients."""
        if self._attached is None and not self.may_attach():
            return
        num_before = self._num_seen.get(model, 0)
        optimizers = self.optimizers.holding(model) if num_before != self.optimizers.num_made else ()
        self._num_seen[model] = self.optimizers.num_made
        if not model.is_attached and not optimizers:
            return
        if self.sharded is not None and self.sharded.is_attached:
            from real.fully_shard import mixed

            raise mixed()
        if self._attached is None:
            from real.attach.attaching import Attached

            self._attached = Attached()
            note_attached()
        self._attached.before_forward(model, optimizers)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's steps are updates of the job."""
        return any(each is not None and each.follows(optimizer) for each in (self._attached, self.sharded))

    def stepped(self, _optimizer: Optimizer) -> None:
        """Count a step during which the job began to follow the optimizer."""
        for each in (self._attached, self.sharded):
            if each is not None:
                each.stepped()

    @property
    def attached(self) -> "Attached | None":
        """Part of the job for models of DistributedDataParallel; ``None`` until a model is attached."""
        return self._attached

    def may_attach(self) -> bool:
        """Whether this is the script's own process, not a fork, and the script does not call ``fleet.init`` itself."""
        known = sys.modules.get("real.fleet")
        if known is None or known.fleet.job is None:
            return self._process == os.getpid()  # not a DataLoader's worker
        self._why_not = FOUR_LINES
        return False

    def _note_end(self) -> None:
        if self._attached is None and not (self.sharded and self.sharded.is_attached) and self._process == os.getpid():
            self.may_attach()
            note_unattached(self._why_not)
