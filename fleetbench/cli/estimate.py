"""``fleetbench estimate``: layer times of a GPU that you do not have."""

from __future__ import annotations

import argparse
import dataclasses
import re
from importlib import resources
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.cli.options import Commands, add_command, add_experiment, add_json, check_writable, load_experiment
from fleetbench.cli.profile import show
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from fleetbench.profile import Profile

GPT_SIZES = {
    "124M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
}
"""Number of layers, hidden size and number of heads by name. Source: GPT-3, arXiv 2005.14165, table 2.1; the
smallest, called 125M there, is GPT-2's."""
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "estimate", "layer times of a GPU that you do not have, for sim and tune --simulate-only", run)
    add_experiment(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="such as A100 or RTX-4090, or figures: 40 TFLOP/s, 900 GB/s, 24 GB; default: cluster.gpu"
    )
    gpt = f"a GPT instead of the file's model: {', '.join(GPT_SIZES)}, or LAYERSxHIDDENxHEADS"
    parser.add_argument("--gpt", metavar="SIZE", help=gpt)
    config = "a model as Hugging Face publishes it instead of the file's: the path of its config.json"
    parser.add_argument("--model", metavar="FILE", help=config)
    precision = "precision of matrix products: fp32, tf32, or mixed precision fp16 or bf16; default: from strategy.amp, or fp32"
    parser.add_argument("--precision", choices=_PRECISIONS, metavar="NAME", help=precision)
    add_json(parser, "the profile")


def run(arguments: argparse.Namespace) -> int:
    """Estimate a profile, write its folder, and print the layers and the time of a step."""
    from fleetbench.hardware import gpu_name
    from real.estimate.step import estimate
    from real.profile.measuring import Taken

    if arguments.gpt and arguments.model:
        raise ConfigError("does not go with --model: both name a model", "--gpt", arguments.gpt, "drop one of them")
    if arguments.experiment is None and (arguments.gpt or arguments.model):
        arguments.experiment = str(resources.files("fleetbench").joinpath("gpt.toml"))
    experiment = _asked(arguments)
    check_writable(arguments.out)
    gpu = experiment.cluster.gpu if arguments.gpu is None else gpu_name(arguments.gpu, "--gpu")
    if gpu is None:
        raise ConfigError("nothing names a GPU", "--gpu", hint='add --gpu H100, or cluster.preset = "8 x 8 H100, 400G per NIC" to the file')
    profile = estimate(experiment, gpu, tf32=arguments.precision == "tf32")
    return show(Taken(experiment=experiment, profile=profile, runs={}), arguments, said(experiment, profile, gpu))


def _asked(arguments: argparse.Namespace) -> Experiment:
    """Return the experiment with ``device = "cuda"``, and with the model and precision that options name."""
    if arguments.gpt is not None:
        layers, hidden, heads = _gpt(arguments.gpt)
        options = f"{{ layers = {layers}, hidden = {hidden}, heads = {heads} }}"
        arguments.overrides = ["workload.model=gpt", f"workload.model_options={options}", *arguments.overrides]
    if arguments.model is not None:
        arguments.overrides = [f"workload.model={arguments.model}", "workload.model_options={}", *arguments.overrides]
    if arguments.precision in ("fp16", "bf16"):
        arguments.overrides = ["strategy.amp=true", f"strategy.amp_configs.dtype={arguments.precision}", *arguments.overrides]
    experiment = load_experiment(arguments)
    return experiment.replace(run=dataclasses.replace(experiment.run, device="cuda"))


def _gpt(size: str) -> tuple[int, ...]:
    shape = _SHAPE.fullmatch(size)
    if shape is not None:
        return tuple(map(int, shape.groups()))
    if size.upper() not in GPT_SIZES:
        raise ConfigError(
            "not a size of a GPT", "--gpt", repr(size), f"one of {', '.join(GPT_SIZES)}, or 24x1024x16: layers, hidden, heads"
        )
    return GPT_SIZES[size.upper()]


def said(experiment: Experiment, profile: Profile, gpu: str) -> str:
    """Return lines of text: time of a step with its interval, number of parameters, memory."""
    from fleetbench.hardware import gpu_named

    table, half, memory = profile.tables[0], profile.estimated or 0.0, profile.memory
    step_s = (table.forward_ns + table.backward_ns + table.update) / 1e9
    low, high = units.seconds(step_s * (1 - half)), units.seconds(step_s * (1 + half))
    lines = [
        f"estimated compute: {units.seconds(step_s)} a step of {experiment.workload.batch_size} samples, in 90 % of cases {low} to {high}"
    ]
    lines.append(f"parameters: {sum(gradient.numel for layer in table.layers for gradient in layer.gradients):,}")
    if memory is not None:
        has = gpu_named(gpu, "--gpu").memory
        fits = "which fits" if memory.peak <= has else "which does NOT fit"
        lines.append(f"memory: {units.size(memory.peak)} of the {units.size(has)} of a {gpu}, {fits}")
    return "\n".join(lines)
