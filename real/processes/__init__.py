"""Processes of a job: how they start, where they run, and how others learn that one lives or which one failed.

Several observers watch the processes, and each sees what the others cannot:

- a driver sees its ranks' steps and errors in the job's folder, and blames by them (``diagnosis``);
- the ranks of a script see each other through the store at which they met (``failures``), even without a driver;
- a launcher sees exit codes of processes on its host (``real.job.launcher``, ``served_launcher``);
- trainers and servers see whether the other end of a connection answers heartbeats (``real.servers.links``);
- servers see which trainers have never come, or keep the others waiting (``real.servers.server``).

``real.processes.diagnosis.blamed`` has the order in which drivers and launchers blame a process for the end of a job.
"""
