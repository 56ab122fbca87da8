"""Following: changes to a module of torch that has just been imported.

``import torch`` is not finished here, so nothing else of torch may be imported.
"""

import os
from functools import cache
from types import ModuleType

from real.attach.job import Job
from real.processes.roles import ATTACH, STRATEGY, TUNING, WHY


def follow(module: ModuleType) -> None:
    """Change the module if this process's environment asks for a job; otherwise leave it unchanged."""
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
    """Return the job that this process's environment asks for, or ``None``."""
    return Job() if TUNING in os.environ or STRATEGY in os.environ else None
