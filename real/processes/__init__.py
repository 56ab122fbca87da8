"""Processes of a job: how they start, where they run, and who detects that one lives or which one failed.

Each of these has another view, and sees failures that the others cannot:

- a driver sees its ranks' steps and errors in the job's folder, and assigns blame by them (``diagnosis``)
- the ranks of a script see each other through the store at which they met (``failures``), also without a
  driver
- a launcher sees exit codes of its host, and reports them to a job's servers (``real.job.launcher``,
  ``served_launcher``)
- trainers and servers see whether the other end of a connection answers (``real.servers.links``)
- servers see which trainers are silent, and continue without them or end the job (``real.servers.server``)

Drivers and launchers of collective trainers blame a killed rank before a failed one, and a rank's own error
before that of a collective. ``real.job.launcher.verdict`` has the order of a launcher's findings.
"""
