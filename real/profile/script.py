"""The profile of a user's script: the legs of any profile, in the script's own loop."""

from __future__ import annotations

import dataclasses

from fleetbench.profile import compute_part
from real.job.script_session import ScriptSession
from real.profile.measuring import SECONDS, Progress, Taken, measure_in


def profile_script(
    session: ScriptSession,
    thread_counts: tuple[int, ...],
    *,
    seconds: float = SECONDS,
    stragglers: bool = False,
    progress: Progress | None = None,
) -> Taken:
    """Measure the session's script; see ``real.profile.legs``.

    Among several nodes of several trainers, the profile has one link, that of a ring over all. Where the
    link inside a node is not declared it is taken to be as slow, so that rings cost what was measured.
    """
    experiment = session.experiment
    quiet = experiment.replace(
        strategy=compute_part(experiment.strategy), workload=dataclasses.replace(experiment.workload, profile=None, target_loss=None)
    )
    taken = measure_in(session, experiment, quiet, thread_counts, seconds=seconds, stragglers=stragglers, progress=progress)
    communication, cluster = taken.profile.communication, experiment.cluster
    if communication is None or communication.between != "nodes" or cluster.trainers_per_node == 1 or cluster.intra is not None:
        return taken
    inside = dataclasses.replace(communication.link, payload=True)
    return dataclasses.replace(taken, experiment=experiment.replace(cluster=dataclasses.replace(cluster, intra=inside)))
