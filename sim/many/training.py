"""training: virtual trainers of several simulations, each training once."""

import dataclasses
from collections.abc import Sequence

from sim.learning.trajectory import Learn, key_of
from sim.many.pool import Job, Where, naming, run_all


def trained(jobs: Sequence[Job], learn: Learn | None, on: Where) -> list[Job]:
    """Return the jobs with the results of their virtual trainers; unchanged if ``learn`` is ``None``.

    Locally, they train one after another in this process, because torch computes no gradients in its forks.
    """
    if learn is None:
        return [*jobs]
    alike: dict[str, Job] = {}
    keys = []
    for job in jobs:
        with naming(job.label):  # with servers, what is learnt depends on the clock, too
            keys.append(job.experiment.digest() if job.experiment.strategy.mode == "ps" else key_of(job.experiment))
        alike.setdefault(keys[-1], job)
    labels, first = [job.label for job in alike.values()], [job.experiment for job in alike.values()]
    learnt = dict(zip(alike, run_all(learn, first, labels=labels, on=on, processes=1), strict=True))
    return [dataclasses.replace(job, learnt=learnt[key]) for job, key in zip(jobs, keys, strict=True)]
