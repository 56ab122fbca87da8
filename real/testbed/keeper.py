"""Keeper: the one process that holds a testbed. When it ends, for whatever reason, nothing of it is left.

``python -m real.testbed.keeper [--rootless]``. Its namespaces have no names, only files that are open in
this process, so nothing of them shows in the machine's own and nothing has to be taken down. It reads
requests, one line of JSON each, and answers each with one; it ends with its input, that is with the driver.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from real.testbed import kernel
from real.testbed.network import Network, StepRefused
from real.testbed.ring import ring
from real.testbed.transfer import rates

ROOTLESS = "--rootless"


def main(arguments: list[str]) -> int:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        if ROOTLESS in arguments:
            kernel.become_root_of_a_new_user_namespace()
        kernel.private_mounts()
        kernel.unshare(kernel.NEW_NET)
        network = Network()
    except OSError as error:
        answer({"error": f"{error.filename}: {error.strerror}"})
        return 1
    answer({"pid": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(_SERVICES[request.pop("do")](network, **request))
        except (OSError, StepRefused) as error:
            answer({"error": ": ".join(map(str, error.args)), "refused": isinstance(error, StepRefused)})
    return 0


def _add(network: Network, names: list[str]) -> dict[str, Any]:
    network.add(names)
    return {"files": network.files}


def _congestion_control(network: Network) -> dict[str, Any]:
    return {"congestion_control": network.congestion_control()}


def _apply(network: Network, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"refused": network.carry_out(steps)}


def _counters(network: Network) -> dict[str, Any]:
    return {"counters": network.counters()}


def _rates(network: Network, flows: list[list[str]], skip_s: float, seconds: float) -> dict[str, Any]:
    return {"bps": rates(network.inside, flows, skip_s=skip_s, seconds=seconds)}


def _ring(network: Network, hosts: list[list[str]], chunk_bytes: int, rounds: int) -> dict[str, Any]:
    return {"times_s": ring(network.inside, hosts, chunk_bytes=chunk_bytes, rounds=rounds)}


_SERVICES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "add": _add,
    "congestion_control": _congestion_control,
    "apply": _apply,
    "counters": _counters,
    "rates": _rates,
    "ring": _ring,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
