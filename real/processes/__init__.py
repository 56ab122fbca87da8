"""Processes of a job: what starts them, where they run, and who says that one lives or which one failed.

Each is asked by another party, and sees what the others cannot:

- a driver sees its ranks' steps and errors in the job's folder, and blames by them (``diagnosis``);
- the ranks of a script see each other through the store at which they met (``failures``), also where no driver is;
- a launcher sees exit codes of its host (``real.job.launcher``, ``served_launcher``);
- trainers and servers see whether the other end of a connection answers heartbeats (``real.servers.links``);
- servers see which trainers have never come, or keep the others waiting (``real.servers.server``).

``real.processes.diagnosis.blamed`` has the order in which drivers and launchers name the process that broke a job.
"""
