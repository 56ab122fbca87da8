"""Following: what is changed in a module of torch's that has just been imported.

``import torch`` is under way here, so that nothing else of torch's may be imported.
"""

import os
from functools import cache
from types import ModuleType

from real.attach.job import Job
from real.processes.roles import ATTACH, STRATEGY, TUNING, WHY


def follow(module: ModuleType) -> None:
    """Change the module, in a process in which the job orders something; in others it stays as it is."""
    if ATTACH in os.environ and WHY in os.environ:
        from real.why.following import follow as look_at

        look_at(module)
        return
    if ATTACH not in os.environ or (job := job_here()) is None:
        return
    if module.__name__ == "torch.nn.parallel.distributed":
        from real.attach.ddp import replace

        replace(module, job)
    elif "fsdp" in module.__name__:
        from real import fully_shard
        from real.attach.sharded import Sharded

        job.sharded = job.sharded or Sharded(job)
        fully_shard.follow(module, job.sharded)
    else:
        job.optimizers.follow(module, job.follows, job.stepped)


@cache
def job_here() -> Job | None:
    """What this process has to do for the job in its environment; none where that orders nothing."""
    return Job() if TUNING in os.environ or STRATEGY in os.environ else None
