"""Estimate of a user's script: it builds the model and reads data, but its step computes nothing.

The script runs in a process of its own, with ``python``, up to its first update. From the model's first
forward to ``optimizer.step()``, tensors have no data. Code that needs their values, such as ``loss.item()``,
makes the estimate fail with an error.
"""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from fleetbench.config import decode, encode
from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile, compute_key
from fleetbench.strategy import DistributedStrategy
from real.job.facts import Facts, experiment_of, facts_of

_WHERE = "the script's step"


def estimate_script(base: Experiment, command: Sequence[str], gpu: str, *, tf32: bool, workdir: Path | None) -> tuple[Experiment, Profile]:
    """Return the script's experiment on ``base``'s cluster, and its profile on ``gpu``.

    Raises ``ConfigError`` for a step that cannot be estimated, and ``WorkerFailed`` if the script itself
    fails.
    """
    if len(command) < 2 or not Path(command[0]).name.startswith("python") or not command[1].endswith(".py"):
        hint = "fleetbench estimate --gpu A100 -- python train.py; the experiment's cluster has the number of GPUs"
        raise ConfigError("an estimate runs one process, started with python", "--", repr(" ".join(command)), hint)
    with tempfile.TemporaryDirectory(prefix="fleetbench-") as scratch:
        result = Path(scratch) / "result.json"
        order = json.dumps({"gpu": gpu, "tf32": tf32, "result": str(result)})
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        line = [command[0], "-m", "real.estimate.script", order, *command[1:]]
        code = subprocess.run(line, cwd=workdir, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr, check=False).returncode
        if not result.exists():
            what = f"the script ended with exit code {code} before its first optimizer.step()"
            hint = (
                f"it must call fleet.distributed_model, fleet.distributed_optimizer and train; fleetbench is installed for {sys.executable}"
            )
            raise WorkerFailed(what, " ".join(command), hint=hint)
        found = json.loads(result.read_text(encoding="utf-8"))
    if "refused" in found:
        what, where, value, hint = found["refused"]
        raise ConfigError(what, where, value, hint)
    experiment = experiment_of(base, decode(found["facts"], Facts, "facts"), tuple(command))
    experiment = experiment.replace(cluster=base.cluster, run=dataclasses.replace(base.run, launcher="command"))
    profile = decode(found["profile"], Profile, "profile")
    tables = tuple(dataclasses.replace(table, key=compute_key(experiment)) for table in profile.tables)
    return experiment, dataclasses.replace(profile, tables=tables)


class _Script:
    """Estimates a script's step inside the script's process.

    Life cycle: the script's calls of ``distributed_model`` -> the first forward -> ``backward`` -> the
    optimizer's ``step``, which ends the process.
    """

    def __init__(self, gpu: str, result: str, *, tf32: bool) -> None:
        self._gpu, self._tf32, self._result = gpu, tf32, Path(result)
        self.entered = ExitStack()
        self.strategy = DistributedStrategy()
        self.forwards = 0
        self.batch_size: int | None = None

    def install(self) -> None:
        """Replace the methods of ``Fleet``, and ``torch.autograd.backward``."""
        import torch

        from real.fleet import Fleet

        plain_init, plain_backward = Fleet.init, torch.autograd.backward

        def init(fleet: Fleet, strategy: DistributedStrategy | None = None, **options: Any) -> None:
            self.strategy = strategy or DistributedStrategy()
            if self.strategy.mode == "ps":
                raise ConfigError("a step with parameter servers is not estimated", "strategy.mode", "'ps'", "leave it at its default")
            plain_init(fleet, self.strategy, **options)

        def backward(*args: Any, **kwargs: Any) -> None:
            self._saved.close()
            plain_backward(*args, **kwargs)
            self.step.backward_ends()

        Fleet.init = init  # type: ignore[method-assign, assignment]  # of this process
        Fleet.distributed_model = lambda _, model: self.hook(model)  # type: ignore[method-assign, assignment]  # as above
        Fleet.distributed_optimizer = lambda _, optimizer: self.end_with(optimizer)  # type: ignore[method-assign, assignment]  # as above
        Fleet.report = lambda *_, **__: None  # type: ignore[method-assign]  # as above
        torch.autograd.backward = backward

    def hook(self, model: Any) -> Any:
        """Hook the model: the estimate starts with its first forward in training."""
        from real.estimate.operations import nothing_computed
        from real.estimate.step import StepEstimate

        def begin(module: Any, args: Any) -> None:
            import torch

            if not (torch.is_grad_enabled() and module.training):
                return
            self.forwards += 1
            if self.forwards > 1:
                hint = "make one forward per update; strategy.gradient_merge sets the number of forwards"
                raise ConfigError("a second forward before the update is not estimated", _WHERE, hint=hint)
            self.batch_size = next((len(item) for item in args if isinstance(item, torch.Tensor)), None)
            self.entered.enter_context(nothing_computed())
            self.entered.enter_context(self.step.recorder)
            self._saved = ExitStack()
            self._saved.enter_context(self.step.forward)

        model.register_forward_pre_hook(begin)
        self.step = StepEstimate(model, self.strategy, self._gpu, tf32=self._tf32)
        self.model = model
        return model

    def end_with(self, optimizer: Any) -> Any:
        """Make the optimizer's first step write the result and end the script."""
        plain_step = optimizer.step

        def step(*_: Any, **__: Any) -> NoReturn:
            optimizer.step = plain_step
            self.step.update(optimizer)
            self.entered.close()
            known = {"strategy": self.strategy, "batch_size": self.batch_size, "backend": "nccl", "device": "cuda"}
            facts = facts_of(self.model, optimizer, trainers=1, trainers_per_node=1, **known)
            self.write({"facts": encode(facts), "profile": encode(self.step.profile("script"))})
            raise SystemExit(0)

        optimizer.step = step
        return optimizer

    def write(self, found: dict[str, Any]) -> None:
        """Write the result for the process that started the script."""
        self._result.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Run the script. The process's arguments are the order as JSON, the script's path, and its arguments."""
    script = _Script(**json.loads(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    # torch.autocast only warns before it switches itself off, and types would be wrong
    warnings.filterwarnings("error", message=".*device_type of 'cuda'.*")
    script.install()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ConfigError as error:
        script.write({"refused": error.args})
    except Exception as error:
        script.entered.close()
        if not script.forwards and not isinstance(error, UserWarning):
            raise
        hint = "read no values between the forward and optimizer.step(); mixed precision is strategy.amp, or --precision"
        script.write(
            {
                "refused": (
                    f"needs data that an estimate does not have: {type(error).__name__}: {str(error).splitlines()[0]}",
                    _WHERE,
                    None,
                    hint,
                )
            }
        )


if __name__ == "__main__":
    main()
