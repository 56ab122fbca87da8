"""on_ray: calls a function on parts of items as tasks of Ray.

Ray schedules the tasks, and runs those of lost workers again. It is the cluster of ``RAY_ADDRESS`` or, without
that, one that is started on this machine, bound to loopback. Ray is imported only by these functions.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from fleetbench.errors import EnvironmentLacks

_RETRIES = 10
"""Number of times that a task of a lost worker runs again."""
_MEMORY = 512 * 2**20
"""Bytes that a task declares to Ray. Ten thousand trainers with a thousand steps take 190 MiB."""
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's only switch for loopback addresses, on every system
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about devices, which no task uses
}
"""Environment of a Ray that is started here."""


@contextmanager
def connected() -> Iterator[None]:
    """Connect this process to Ray, and disconnect it at the end, unless it is connected already.

    On a cluster, workers run this process's copy of our packages, whatever is installed there.

    Raises ``EnvironmentLacks`` if Ray is not installed, or if the cluster of ``RAY_ADDRESS`` does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    with _environment({} if address else _LOCAL):
        try:
            import ray
        except ImportError:
            hint = "python -m pip install 'fleetbench[ray]'"
            raise EnvironmentLacks("Ray is not installed", "ray", hint=hint) from None
        if ray.is_initialized():
            yield
            return
        own: dict[str, Any] = {"address": "local", "num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False}
        if address:
            own = {
                "address": address,
                "runtime_env": {"py_modules": [import_module(name) for name in ("fleetbench", "sim", "real", "tuner")]},
            }
        try:
            handler = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(**own, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                hint = "start one: ray start --head; without RAY_ADDRESS one is started here"
                raise EnvironmentLacks(f"no cluster of Ray answers: {error}", "RAY_ADDRESS", address, hint) from None
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own ends this process
            yield
        finally:
            ray.shutdown()


def num_cpus() -> int:
    """Return the number of cores of the connected Ray, at least 1."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def results(called: Callable[[Any, Any], Any], function: Any, calls: Sequence[Any]) -> Generator[Any]:
    """Yield ``called`` with the function and each call, in their order, each as a task of the connected Ray.

    Raises what ``called`` raises, and ``EnvironmentLacks`` if a task has lost too many workers.
    """
    import ray

    task, shared = ray.remote(num_cpus=1, memory=_MEMORY, max_retries=_RETRIES)(called), ray.put(function)
    left = [task.remote(shared, call) for call in reversed(calls)]
    try:
        while left:
            found = ray.get(left[-1])
            left.pop()
            yield found
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        said = str(error).partition("\n")[0]
        hint = "it may have run out of memory: fewer trainers or steps need less"
        raise EnvironmentLacks(f"Ray lost a simulation {_RETRIES + 1} times: {said}", "ray", hint=hint) from error
    finally:
        for one in left:
            ray.cancel(one)


@contextmanager
def _environment(own: dict[str, str]) -> Iterator[None]:
    """Set variables, unless they are set, and restore the whole environment at the end, which Ray changes, too."""
    before = os.environ.copy()
    os.environ.update({name: value for name, value in own.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
