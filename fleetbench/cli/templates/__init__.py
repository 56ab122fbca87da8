"""Templates of scripts that start an experiment's trainers on a cluster, for a user to fill in and submit.

``slurm.sh`` is a batch script, ``torchrun.sh`` a script to run on every node, ``kubernetes.yaml`` an indexed
Job with the service through which its pods find pod 0. All three train by default. With the argument
``inside`` they tune, and one of the workers is also the driver; with ``tune`` (``slurm.sh``, and
``torchrun.sh`` on one node) the driver is a process of its own. ``slurm_servers.sh`` is the batch script for
an experiment with parameter servers; it can only train.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2

from fleetbench import __version__
from fleetbench.cli.your_script import REGISTRY_SCRIPT
from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted

_FILES = {"slurm": "slurm.sh", "torchrun": "torchrun.sh", "kubernetes": "kubernetes.yaml"}
_LABEL = 50
"""Largest length of a name in Kubernetes: 63 characters are allowed, and a pod's number is appended."""


def render_template(form: str, experiment: Experiment, path: Path, script: Sequence[str]) -> str:
    """Return the filled-in template of a form: ``slurm``, ``torchrun`` or ``kubernetes``.

    ``path`` is the path of the experiment's file on the cluster's nodes. ``script`` is a Python file or another
    program, with its arguments; if it is empty, the experiment's own workload is trained. Raises
    ``ConfigError`` for parameter servers in a form other than ``slurm``, or without a Python file.
    """
    experiment.cluster.require_even("a template starts as many trainers on every node")
    has_servers = experiment.strategy.mode == "ps"
    if has_servers:
        _refuse_served(form, path, script)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: resources.files(__name__).joinpath(name).read_text(encoding="utf-8")),
        autoescape=False,  # noqa: S701  # shell and YAML, which escapes of HTML would break
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = _quoted
    environment.filters["text"] = json.dumps  # a JSON string is one of YAML's
    # Kubernetes replaces ``$(NAME)`` in commands and values, and ``$$`` by ``$`` (API reference, EnvVar)
    environment.filters["pod"] = lambda text: re.sub(r"\$(?=[$(])", "$$", text)
    environment.filters["counted"] = counted
    cluster, run = experiment.cluster, experiment.run
    cores = None if cluster.cores_per_node == Cluster().cores_per_node else cluster.cores_per_node
    own_hosts = cluster.server_placement == "own"
    is_python = not script or script[0].endswith(".py")
    program = [*script] or ["-m", REGISTRY_SCRIPT, str(path)]
    python = ["python", "-u"] if script else ["python", "-u", "-P"]
    return environment.get_template("slurm_servers.sh" if has_servers else _FILES[form]).render(
        version=__version__,
        experiment=experiment,
        cluster=cluster,
        run=run,
        label=_label(experiment.name),
        path=str(path),
        own_hosts=own_hosts,
        hosts=cluster.nodes + (cluster.servers if own_hosts else 0),
        cores=cores,
        cores_per_trainer=cores and max(1, cores // cluster.trainers_per_node),
        gpus=cluster.trainers_per_node if run.device == "cuda" else 0,
        startup_s=max(1, run.startup_timeout // 10**9),
        command=_joined([*python, *program] if is_python else program),
        torchrun_arguments=_joined(program if is_python else ["--no-python", *program]),
        script=_joined(script),
        own=not script,
    )


def _joined(words: Sequence[str]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Return a word quoted for bash, in ASCII and on one line: a line break would end a line of YAML."""
    if word.isascii() and word.isprintable():
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"


def _refuse_served(form: str, path: Path, script: Sequence[str]) -> None:
    if form != "slurm":
        hint = "--print slurm; or on every host: fleetbench launch --servers HOST:PORT,... --workers HOST:N,... train.py"
        raise ConfigError('starts no parameter servers, which mode = "ps" needs', "--print", form, hint)
    if not script or not script[0].endswith(".py"):
        hint = f"fleetbench launch --print slurm {shlex.quote(str(path))} -- train.py, a script that asks fleet.is_server()"
        raise ConfigError(
            "servers and trainers are processes of one Python file of yours", "--print slurm", shlex.join(script) or "none", hint
        )


def _label(name: str) -> str:
    """Return a name that Kubernetes accepts: small letters, digits and hyphens, a letter first (RFC 1035)."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:_LABEL].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")
