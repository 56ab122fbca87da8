"""The set of commands and options, frozen: whoever adds one changes this list knowingly."""

from __future__ import annotations

import argparse

from fleetbench.cli.main import build_parser
from fleetbench.cli.your_script import TAKE_A_COMMAND

EXPERIMENT = ["--help", "--json", "--out", "--seed", "--set", "-h", "EXPERIMENT.toml"]
OPTIONS = {
    "why": sorted(
        "--against --fail-above --help --json --link --out --ranks --seconds --set --trace --workdir -h TRACE".split()  # noqa: SIM905  # short
    ),
    "sim": sorted([*EXPERIMENT, "--strategy", "--engine", "--loss", "--on", "--seeds", "--sweep", "--table", "--what-if"]),
    "real": sorted([*EXPERIMENT, "--strategy"]),
    "tune": sorted([*EXPERIMENT, "--strategy", "--from", "--on", "--simulate-only", "--sweep", "--verbose", "-v", "--workdir"]),
    "profile": sorted([*EXPERIMENT, "--seconds", "--workdir", "--from"]),
    "report": ["--help", "--json", "-h", "FOLDER"],
    "compare": ["--fail-over", "--help", "--json", "--losses", "-h", "A", "B", "OTHER"],
    "launch": [
        "--help",
        "--log-dir",
        "--nproc",
        "--print",
        "--restarts",
        "--servers",
        "--startup-timeout",
        "--strategy",
        "--workers",
        "-h",
        "ARGS",
        "SCRIPT",
    ],
    "evaluate": sorted([*({*EXPERIMENT} - {"--out"}), "MODEL.pt2", "--against", "--samples", "--to", "--tolerance"]),
    "testbed": EXPERIMENT,
    "doctor": ["--help", "--json", "--network", "--nproc", "-h"],
    "calibrate": sorted([*EXPERIMENT, "--fit", "--flops", "--global-batch", "--gpus", "--on", "--parameters", "CELLS"]),
    "estimate": sorted([*EXPERIMENT, "--gpu", "--gpt", "--model", "--precision"]),
}


def _spelled(parser: argparse.ArgumentParser) -> list[str]:
    names: list[str] = []
    for action in parser._actions:
        names += action.option_strings or [str(action.metavar)]
    return sorted(names)


def test_commands_and_options_are_these() -> None:
    """Commands in the order of the help, each with its options and positionals."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert {name: _spelled(sub) for name, sub in commands.choices.items()} == OPTIONS
    assert _spelled(parser) == ["--help", "--version", "-h", "COMMAND"]


def test_options_are_not_abbreviated() -> None:
    """An abbreviation that works today would change its meaning with the next option."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert not parser.allow_abbrev
    assert not any(sub.allow_abbrev for sub in commands.choices.values())


def test_the_usage_says_where_a_command_stands() -> None:
    """After everything else, for the commands that take one, and for no other."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    takes = {name for name, sub in commands.choices.items() if sub.format_usage().rstrip().endswith(" [-- COMMAND ...]")}
    assert takes == set(TAKE_A_COMMAND)
    assert commands.choices["tune"].format_usage().startswith("usage: fleetbench tune [-h]")
