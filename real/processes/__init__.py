"""Processes of a job: what starts them, where they run, and who says that one lives or which one failed.

Each is asked by another party, and sees what the others cannot:

- a driver sees its ranks' steps and errors in the job's folder, and blames by them (``diagnosis``);
- the ranks of a script see each other through the store at which they met (``failures``), also where no
  driver is;
- a launcher sees exit codes of its host, and tells them to a job's servers (``real.job.launcher``,
  ``served_launcher``);
- trainers and servers see whether the other end of a connection answers (``real.servers.links``);
- servers see which trainers they have not heard of, and go on without them or end the job
  (``real.servers.server``).

Drivers and launchers of trainers that meet in collectives name who was killed before who failed, and a rank's
own error before that of a collective. What launchers say has its order in ``real.job.launcher.verdict``.
"""
