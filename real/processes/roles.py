"""Role: which trainer or server of a job this process is, according to the environment variables of its launcher.

There are four kinds of start. The first in this table whose variables are set applies.

=========  ==========================================================================================
torchrun   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK: torchrun,
           ``fleetbench launch``, and operators of Kubernetes that start one trainer per pod
Paddle     PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS, TRAINING_ROLE and
           PADDLE_PSERVERS_IP_PORT_LIST: Fleet's own launchers, and clouds that imitate them
Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS and other variables of a step: ``srun``. A batch script's own
           process is no step, and trains alone
none       one trainer alone
=========  ==========================================================================================

Sources: torch's documentation of torchrun; Paddle's ``PaddleCloudRoleMaker``; srun(1), "output
environment variables".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetbench.errors import ConfigError

STORE = "FLEETBENCH_STORE"
"""Environment variable with the file through which the ranks of ``fleetbench launch`` find each other."""

JOINED = "FLEETBENCH_JOINED"
"""Environment variable with the path of a file that exists once a trainer of ``fleetbench launch`` has called
``fleet.init``."""

ATTACH = "FLEETBENCH_ATTACH"
"""Environment variable with a job's folder, for a command whose scripts need not call fleetbench: see
``real.attach``."""

STRATEGY = "FLEETBENCH_STRATEGY"
"""Environment variable with the file of ``fleetbench launch --strategy``."""

STARTUP = "FLEETBENCH_STARTUP_TIMEOUT"
"""Environment variable with the seconds that a server or trainer of ``fleetbench launch --servers`` waits for
the others to come."""

TUNING = "FLEETBENCH_TUNING"
"""Environment variable with a job's folder, for a user's script that ``fleetbench profile``, ``tune`` or ``why
-- COMMAND`` drives."""

WHY = "FLEETBENCH_WHY"
"""Environment variable of a command that ``fleetbench why`` observes: its DistributedDataParallel is left
unchanged."""

SEED = "FLEETBENCH_SEED"
"""Environment variable with the seed of a run to the target during tuning, for scripts that read it."""

ENVIRONMENT = "env://"
"""``init_method`` that reads MASTER_ADDR and MASTER_PORT."""

_HINT = "start with fleetbench launch, torchrun, srun or a Paddle launcher; alone, a script needs none of these variables"
_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Role of one process in a job. The defaults are those of a script that was started alone."""

    launcher: Literal["none", "torchrun", "Paddle", "Slurm"] = "none"
    kind: Literal["trainer", "server"] = "trainer"
    rank: int = 0
    """Rank among the trainers, or among the servers."""
    trainers: int = 1
    local_rank: int = 0
    """Rank among the trainers of its node."""
    trainers_per_node: int | None = 1
    """Number of trainers per node; ``None`` if nodes differ, or if a node's ranks are not consecutive, so that
    there is no hierarchy."""
    rendezvous: str | None = None
    """``init_method`` of torch's process group; ``None`` for a single trainer, and if ``store`` is given."""
    store: str | None = None
    """Path of the file through which the trainers find each other. It is not a URL, because ``#`` and ``?`` would end
    the name there."""
    endpoints: tuple[str, ...] = ()
    """``host:port`` of every trainer, if the launcher gives it."""
    servers: tuple[str, ...] = ()
    """``host:port`` of every parameter server."""


def role_of(environment: Mapping[str, str]) -> Role:
    """Return the role that the variables define. Raises ``ConfigError`` for a missing or invalid variable."""
    if "RANK" in environment:
        return _of_torchrun(environment)
    if "PADDLE_TRAINER_ID" in environment or environment.get("TRAINING_ROLE") == "PSERVER":
        return _of_paddle(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _of_slurm(environment)
    return Role()


def role_among(hosts: Sequence[str], rank: int) -> Role:
    """Return the role of a rank whose script has made the process group itself.

    ``hosts`` has every rank's host.
    """
    return Role(
        rank=rank,
        trainers=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        trainers_per_node=_per_node(hosts),
        rendezvous="the script's own",
    )


def launcher_of(role: Role, environment: Mapping[str, str]) -> str:
    """Return the name of the launcher; ``fleetbench launch`` is known by variables that only it sets."""
    return "fleetbench launch" if JOINED in environment or STARTUP in environment else role.launcher


def require_address(role: Role, environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if torch's variables must give rank 0's address, but are missing or invalid."""
    if role.rendezvous == ENVIRONMENT:
        _text("MASTER_ADDR", environment)
        _number("MASTER_PORT", environment, least=1)


def _of_torchrun(environment: Mapping[str, str]) -> Role:
    rank, trainers = _rank_of("RANK", "WORLD_SIZE", environment)
    store = environment.get(STORE)
    per_node = _number("LOCAL_WORLD_SIZE", environment, least=1) if "LOCAL_WORLD_SIZE" in environment else 1
    node = _number("GROUP_RANK", environment) if "GROUP_RANK" in environment else rank // per_node
    return Role(
        launcher="torchrun",
        rank=rank,
        trainers=trainers,
        local_rank=_number("LOCAL_RANK", environment) if "LOCAL_RANK" in environment else 0,
        trainers_per_node=per_node if trainers % per_node == 0 and rank // per_node == node else None,
        rendezvous=ENVIRONMENT if store is None else None,
        store=store,
    )


def _of_paddle(environment: Mapping[str, str]) -> Role:
    role = environment.get("TRAINING_ROLE", "TRAINER")
    servers = _list("PADDLE_PSERVERS_IP_PORT_LIST", environment)
    endpoints = _list("PADDLE_TRAINER_ENDPOINTS", environment)
    if role == "PSERVER":
        own = f"{environment.get('POD_IP', '')}:{environment.get('PADDLE_PORT', '')}"
        if own not in servers:
            what = "this server (POD_IP, PADDLE_PORT) is not in the list"
            hint = "a comma-separated list of host:port, the same on every process"
            raise ConfigError(what, "PADDLE_PSERVERS_IP_PORT_LIST", repr(own), hint)
        num = _number("PADDLE_TRAINERS_NUM", environment, least=1)
        return Role(launcher="Paddle", kind="server", rank=servers.index(own), trainers=num, endpoints=endpoints, servers=servers)
    if role != "TRAINER":
        raise ConfigError("is no role that is known here", "TRAINING_ROLE", repr(role), "TRAINER or PSERVER")
    rank, trainers = _rank_of("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", environment)
    if trainers > 1 and len(endpoints) != trainers and (endpoints or not servers):  # trainers of servers need not find each other
        hint = "a comma-separated list of host:port, one for each trainer in the order of their ids"
        raise ConfigError(f"names {len(endpoints)} of {trainers} trainers", "PADDLE_TRAINER_ENDPOINTS", repr(",".join(endpoints)), hint)
    hosts = [endpoint.rpartition(":")[0] for endpoint in endpoints] or [""] * trainers
    return Role(
        launcher="Paddle",
        rank=rank,
        trainers=trainers,
        local_rank=hosts[:rank].count(hosts[rank]),
        trainers_per_node=_per_node(hosts),
        rendezvous=f"tcp://{endpoints[0]}" if trainers > 1 and endpoints else None,
        endpoints=endpoints,
        servers=servers,
    )


def _of_slurm(environment: Mapping[str, str]) -> Role:
    rank, trainers = _rank_of("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", environment)
    per_node = _tasks_per_node(_text("SLURM_STEP_TASKS_PER_NODE", environment))
    node = _number("SLURM_NODEID", environment)
    is_even = len(set(per_node)) == 1 and rank // per_node[0] == node
    host, port = _slurm_endpoint(environment, len(per_node))
    return Role(
        launcher="Slurm",
        rank=rank,
        trainers=trainers,
        local_rank=_number("SLURM_LOCALID", environment),
        trainers_per_node=per_node[0] if is_even else None,
        rendezvous=f"tcp://{host}:{port}" if trainers > 1 else None,
    )


def _slurm_endpoint(environment: Mapping[str, str], num_nodes: int) -> tuple[str, int]:
    """Return host and port at which rank 0 listens.

    The host is the step's first node, or the address of it in MASTER_ADDR. Without MASTER_PORT, the port is the first
    that the step reserved (``srun --resv-ports``). Without that, it follows from the numbers of job and step, so that
    different steps on a node use different ports.
    """
    if "MASTER_ADDR" in environment:
        host = environment["MASTER_ADDR"]
    else:
        host = "127.0.0.1" if num_nodes == 1 else _first_host(_text("SLURM_STEP_NODELIST", environment))
    if "MASTER_PORT" in environment:
        return host, _number("MASTER_PORT", environment, least=1)
    reserved = re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return host, int(reserved[0])
    job, step = _number("SLURM_JOB_ID", environment), _number("SLURM_STEP_ID", environment)
    return host, _PORTS[(7 * job + step) % len(_PORTS)]


def _first_host(nodelist: str) -> str:
    """Return the first of Slurm's list of nodes, such as ``gpu[03-05,9],login``."""
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodelist)
    assert first is not None, "the pattern matches the empty string"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Return Slurm's count of tasks, node by node: ``4(x2),3`` is 4, 4 and 3."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            hint = "for example 8 or 8(x2),4; srun sets it"
            raise ConfigError("is no count of tasks a node", "SLURM_STEP_TASKS_PER_NODE", repr(text), hint)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _per_node(hosts: Sequence[str]) -> int | None:
    """Return the number of trainers per node from every rank's host.

    Return ``None`` if nodes differ, or if a node's ranks are not consecutive.
    """
    num = hosts.count(hosts[0])
    blocks = [set(hosts[first : first + num]) for first in range(0, len(hosts), num)]
    even = len(hosts) % num == 0 and all(len(block) == 1 for block in blocks) and len(set(hosts)) == len(blocks)
    return num if even else None


def _rank_of(rank: str, size: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of trainers from the variables ``rank`` and ``size``."""
    trainers = _number(size, environment, least=1)
    own = _number(rank, environment)
    if own >= trainers:
        raise ConfigError(f"is no rank of {trainers}", rank, str(own), f"0 to {trainers - 1}, as {size} says")
    return own, trainers


def _number(name: str, environment: Mapping[str, str], least: int = 0) -> int:
    text = _text(name, environment)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"is no whole number of at least {least}", name, repr(text), _HINT)
    return int(text)


def _text(name: str, environment: Mapping[str, str]) -> str:
    text = environment.get(name, "")
    if not text:
        raise ConfigError("the launcher's environment is incomplete", name, hint=_HINT)
    return text


def _list(name: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part.strip() for part in environment.get(name, "").split(",") if part.strip())
