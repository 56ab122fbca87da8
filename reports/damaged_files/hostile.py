"""Every key of an experiment with values that nobody means, through ``fleetbench sim``'s own entry function.

    python reports/damaged_files/hostile.py [SECONDS]     # goes on with hostile.jsonl; all pairs take half an hour

A pair passes where the command ends within 20 s with exit code 0, 2 or 3 and without a traceback; 2 and 3 say ``HINT:``.
``announced``: it takes longer, and the command said before it began that it may take minutes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from fleetbench.cli.main import main
from fleetbench.config import Config, field_types
from fleetbench.experiment import Experiment
from fleetbench.stragglers import Straggler

HERE = Path(__file__).resolve().parent
LIMIT_S = 20
SEED = 14
GOOD = ("0", "2", "3", "announced")
MEMORY = 16 * 2**30
_MARK = "@@value@@"

VALUES = [
    "true", "false", "0", "1", "-1", "2", "3", "7", "300", "1000", str(2**31 - 1), str(2**31), str(2**32), "1000000000", str(2**53 + 1),
    str(2**62), str(2**63 - 1), str(2**63), str(2**64), "1" + "0" * 30, str(-(2**63)), str(-(2**64)), "9" * 5000, "0x" + "f" * 5000,
    "0.0", "-0.0", "0.5", "-0.5", "1e-320", "1e-300", "1e300", "1.7e308", "1e400", "nan", "inf", "-inf",
    '""', '"x"', '" "', '"\\u0000"', '"a\\u0000b"', '"\\u202e"', '"\u00e9\u4e2d\U0001f389"', f'"{"x" * 300}"', f'"{"y" * 100_000}"',
    '"../../x"', '"/"', '"/dev/zero"', '"/dev/null"', '"/proc/self/mem"', '"text:/dev/zero"', '"criteo:\\u0000"', '"imagenet:/"',
    '"0 s"', '"1 ns"', '"1e99 s"', '"-1 ms"', f'"{2**63 - 1} ns"', '"2000 h"', '"0 bit/s"', '"1 bit/s"', '"9 TB/s"',
    '"0 B"', '"9000000 TB"',
    '"0.001 steps"', '"1e-99 steps"', '"1e99 steps"', '"0 /step"', '"1 /step"', '"1e-99 /step"', '"gpt2"', '"layers"',
    "[]", "[[]]", "[" * 60 + "]" * 60, "[" * 5000 + "]" * 5000, "{}", "{ a = 1 }", "[{}]", "[0]", "[-1]", "[1, 2, 3]", '["a"]', "[nan]",
    f"[{2**70}]", f"[{', '.join(['1'] * 20_000)}]", "{ a = { a = { a = {} } } }", "1979-05-27T07:32:00Z", "1979-05-27", "07:32:00",
]  # fmt: skip
"""As TOML writes them."""

LONG = (("cluster.servers", "300"), ("cluster.servers", "1000"))
"""Left out: so many servers are simulated event by event, which takes a minute, and the command says so before it begins."""

_LAYER = {"name": "block", "params": 1000, "forward": "1 ms", "backward": "2 ms", "repeat": 3}
_LINK = {"bandwidth": "1 Gbit/s", "latency": "10 us"}


def base(kind: str) -> dict[str, Any]:
    """A small experiment whose tables are all there: ``collective``, ``local``, ``adaptive``, ``ps`` or ``geo``."""
    strategy: dict[str, dict[str, Any]] = {
        "collective": {},
        "local": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
        "adaptive": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
        "ps": {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}},
        "geo": {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 2}},
    }
    return {
        "schema": 1,
        "name": "hostile",
        "workload": {
            "model": "layers",
            "steps": 4,
            "layers": [dict(_LAYER)],
            "loss_curve": {"start": 2.0, "floor": 0.1, "half_life": "20 steps"},
            "lr_decay": [{"step": 2, "factor": 0.5}],
            "host": {"read": "1 ms"},
        },
        "cluster": {
            "nodes": 2,
            "trainers_per_node": 2,
            "servers": 2 if kind in ("ps", "geo") else 0,
            "intra": dict(_LINK),
            "inter": dict(_LINK),
        },
        "strategy": strategy[kind],
        "tune": {},
        "run": {"warmup_steps": 1, "environment": {}},
    }


_NEW: dict[str, dict[str, Any]] = {"racks": {"nodes": 1, "oversubscription": 2.0}}
STRAGGLERS: dict[str, dict[str, Any]] = {
    "jitter": {"distribution": "gamma"},
    "node_shock": {"rate": "0.5 /step"},
    "slow_rank": {"ranks": [1], "factor": 2.0},
    "slow_node": {"nodes": [1], "factor": 2.0},
    "episode": {"rate": "0.1 /step", "length": "3 steps", "factor": 2.0},
    "blocks": {"values": [[0.0, 0.5]], "block_steps": 1},
}


def keys() -> Iterator[tuple[str, str]]:
    """The kind of base and the dotted key of everything that an experiment file may say."""
    for path in _keys_of(Experiment, ""):
        parts = path.split(".")
        kind = "collective"
        if "adaptive" in path:
            kind = "adaptive"
        elif parts[-1].startswith("outer_") or "localsgd" in path:
            kind = "local"
        elif "a_sync" in path or "server" in path:
            kind = "ps"
        yield kind, path
    yield "geo", "strategy.a_sync_configs.k_steps"
    for kind in ("local", "adaptive", "ps", "geo"):  # numbers that every executor uses
        for path in ("workload.steps", "workload.layers", "workload.batch_size", "cluster.nodes", "cluster.trainers_per_node"):
            yield kind, path
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONWARNINGS", "x"):
        yield "collective", f"run.environment.{name}"


def _keys_of(cls: type, before: str) -> Iterator[str]:
    for name, hint in field_types(cls).items():
        path = f"{before}{name}"
        yield path
        if path == "cluster.stragglers":
            for member in typing.get_args(Straggler):
                yield f"{path}[{member.kind}].kind"
                yield from _keys_of(member, f"{path}[{member.kind}].")
            continue
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and issubclass(part, Config):
                yield from _keys_of(part, f"{path}{'[0]' if hint is not part and typing.get_origin(hint) is tuple else ''}.")


def text_of(kind: str, path: str, value: str) -> str:
    """The experiment with the key at this value."""
    data = base(kind)
    table: Any = data
    *parents, last = path.split(".")
    for parent in parents:
        name, _, index = parent.rstrip("]").partition("[")
        if index in STRAGGLERS:
            entry = {"kind": index, **STRAGGLERS[index]}
            table[name] = [entry]
            table = entry
        elif index:
            table = table.setdefault(name, [{}])[0]
        else:
            table = table.setdefault(name, dict(_NEW.get(name, {})))
        if name == "node_overrides":
            table.setdefault("nodes", [1])
    table[last] = _MARK
    return tomli_w.dumps(data).replace(f'"{_MARK}"', value)


def pairs() -> list[tuple[str, str, int]]:
    """Kind of base, key, and the number of the value: five of nine values for every key, others for the next; in an order of chance."""
    found = [(*key, number) for place, key in enumerate(keys()) for number in range(len(VALUES)) if (place + number) % 9 < 5]
    chosen = [pair for pair in found if (pair[1], VALUES[pair[2]]) not in LONG]
    random.Random(SEED).shuffle(chosen)  # noqa: S311  # no secret
    return chosen


class TooLongError(BaseException):
    """The watchdog."""


def _bark(*_: object) -> None:
    raise TooLongError


def one(kind: str, path: str, number: int, folder: Path) -> tuple[str, str]:
    """What became of a pair, ``0``, ``2``, ``3`` or what is wrong, and what was said."""
    file = folder / "hostile.toml"
    file.write_text(text_of(kind, path, VALUES[number]), encoding="utf-8")
    err = io.StringIO()
    signal.signal(signal.SIGALRM, _bark)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    faulthandler.dump_traceback_later(LIMIT_S * 3, exit=True)  # what is stuck in a library is not woken
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(["sim", str(file), "--json", "--out", str(folder / "runs")])
    except TooLongError:
        if "may take minutes" in err.getvalue():
            return "announced", ""
        return "no end", "".join(traceback.format_exc().splitlines(keepends=True)[-4:])
    except BaseException:  # noqa: BLE001  # it is what is looked for
        return "traceback", "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    said = err.getvalue()
    if code not in (0, 2, 3) or (code and ("error: " not in said or "HINT: " not in said)):
        return f"exit {code}", said
    return str(code), said


def row_of(kind: str, path: str, number: int, folder: Path) -> dict[str, Any]:
    """What became of a pair, for the raw data."""
    begin = time.perf_counter()
    ended, said = one(kind, path, number, folder)
    took_s = round(time.perf_counter() - begin, 2)
    row = {"base": kind, "key": path, "number": number, "value": VALUES[number][:40], "ended": ended, "s": took_s}
    return row if ended in GOOD else {**row, "said": said[-1200:]}


def campaign(seconds: float) -> None:
    """Go on with the pairs that ``hostile.jsonl`` lacks, for so long."""
    begin = time.perf_counter()
    with (HERE / "hostile.jsonl").open("a+", encoding="utf-8") as raw, tempfile.TemporaryDirectory() as name:
        raw.seek(0)
        rows = [json.loads(line) for line in raw]
        done = {(row["base"], row["key"], row["number"]) for row in rows}
        for pair in pairs():
            if pair in done:
                continue
            if time.perf_counter() - begin > seconds:
                break
            rows.append(row_of(*pair, Path(name)))
            raw.write(json.dumps(rows[-1]) + "\n")
            raw.flush()
    counts = Counter(row["ended"] for row in rows)
    print(f"{len(rows)} of {len(pairs())} pairs of {len(set(keys()))} keys: {dict(counts)}; slowest {max(row['s'] for row in rows)} s")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    campaign(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))
