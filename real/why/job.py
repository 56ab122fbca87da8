"""Job of ``fleetbench why``, the driver's side: a command whose ranks are observed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Run
from real.job.folder import write_json
from real.job.inside import SHARED
from real.job.launch import CommandLaunch, Progress
from real.processes.place import leave_folder, make_folder
from real.processes.roles import WHY
from real.processes.started import uninterrupted
from real.why.look import ANSWER, Look

_NCCL_TELLS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH,P2P,SHM"}
"""Environment variables that make NCCL print its transports into a job's output."""


class LookedAt:
    """A command that trains with DistributedDataParallel or ``fully_shard``, as a context manager.

    Entering starts the command, leaving ends it. If a rank fails or hangs, the command ends within
    ``run.timeout``, the error names the rank, and the output is kept.
    """

    def __init__(self, command: Sequence[str], run: Run, workdir: Path | None = None) -> None:
        self._command, self._run, self._workdir = tuple(command), run, workdir
        self._folder = Path()
        self._launch: CommandLaunch | None = None
        self.is_over = False
        """Whether the script has ended by itself."""

    @property
    def folder(self) -> Path:
        """Folder in which ranks store traces, while the command runs."""
        return self._folder / "1"

    @property
    def output(self) -> str:
        """Output of the command so far."""
        return (self.folder / "command.log").read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        self._folder = make_folder(Path(os.environ[SHARED]) if SHARED in os.environ else None)
        self._launch = CommandLaunch(self._command, self.folder, self._run)
        try:
            tells = {name: value for name, value in _NCCL_TELLS.items() if name not in os.environ}
            self._launch.start({**tells, **self._run.environment, WHY: "1"}, self._workdir)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        launch, self._launch = self._launch, None
        assert launch is not None
        try:
            if kind is None:
                launch.end()
        except FleetbenchError:
            pass  # its results are there already
        finally:
            with uninterrupted():
                launch.kill()
            leave_folder(self._folder, error)

    def tell(self, numbers: Mapping[str, float]) -> None:
        """Set the numbers that rank 0 logs into the script's open tracker runs when it ends."""
        write_json(self.folder / ANSWER, dict(numbers))

    def look(self, look: Look, progress: Progress | None = None) -> list[Mapping[str, Any]]:
        """Let the ranks carry out a look; return each rank's part, ordered by rank.

        ``is_over`` is then true if the script ended first; parts may be missing. Raises ``ConfigError`` if no
        model of DistributedDataParallel or ``fully_shard`` trains.
        """
        assert self._launch is not None
        is_first = not self._launch.num_orders
        parts = self._launch.run(look, progress)
        self.is_over = not parts or not all(part["complete"] for part in parts.values())
        if not parts and is_first:
            why = self._launch.unattached or "it ended before a model's first step"
            hint = "wrap it with DistributedDataParallel, or shard it with fully_shard; what else trains several ranks is not looked at"
            raise ConfigError(f"has no step that could be looked at: {why}", "the command", " ".join(self._command), hint)
        return [parts[rank] for rank in sorted(parts)]
