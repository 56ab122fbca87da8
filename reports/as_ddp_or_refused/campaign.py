"""Train random loops under random strategies: each as its truth, or refused.

python reports/as_ddp_or_refused/campaign.py --seed 2 --cases 2000       # appends to seed2.csv, goes on where it was
python reports/as_ddp_or_refused/campaign.py --table seed2.csv           # counts
python reports/as_ddp_or_refused/campaign.py --choose before.csv         # cases for the test: what was found, and pairs of features
python reports/as_ddp_or_refused/campaign.py --seed 2 --case 17          # one alone, with what was said
python reports/as_ddp_or_refused/campaign.py --seed 2 --case 17 --shrink # what of it is needed to end so
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLUMNS = ("seed", "case", "verdict", "off", "reason")
sys.path.insert(0, str(HERE.parents[1] / "tests" / "real"))

from random_cases import KNOWN, Case, documented, draw  # noqa: E402  # from the folder that was just named
from random_pool import Pool, Verdict  # noqa: E402  # as above


def main() -> None:
    """Train what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--known", type=int, default=0, help="instead of all cases, so many of each combination that was wrong once")
    parser.add_argument("--case", type=int)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--choose", type=Path)
    arguments = parser.parse_args()
    if arguments.table is not None:
        table(arguments.table)
    elif arguments.choose is not None:
        print(choose(arguments.choose, arguments.seed))
    elif arguments.case is None:
        cases = concerned(arguments) if arguments.known else range(arguments.cases)
        campaign(arguments.seed, cases, arguments.out or HERE / f"seed{arguments.seed}.csv")
    else:
        alone(draw(arguments.seed, arguments.case), shrink=arguments.shrink)


def concerned(arguments: argparse.Namespace) -> list[int]:
    """The first cases of every known combination."""
    cases = {index: draw(arguments.seed, index) for index in range(arguments.cases)}
    found = [[index for index, case in cases.items() if concerns(case)][: arguments.known] for concerns in KNOWN.values()]
    return sorted({index for indices in found for index in indices})


RENEWED = 100
"""Cases after which ranks are started anew: the threads of each case's process groups stay with their process."""


def campaign(seed: int, cases: Iterable[int], out: Path) -> None:
    """Those cases of a seed that the file does not have yet."""
    done = {(int(row["seed"]), int(row["case"])) for row in rows_of(out)} if out.exists() else set()
    counts: Counter[str] = Counter()
    left = [index for index in cases if (seed, index) not in done]
    with ExitStack() as stack, out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for number, index in enumerate(left):
            if number % RENEWED == 0:
                stack.close()
                pool = stack.enter_context(Pool())
            case, start = draw(seed, index), time.monotonic()
            verdict = pool.judge(case)
            writer.writerow({"seed": seed, "case": index, "verdict": verdict.kind, "off": f"{verdict.off:.2g}", "reason": verdict.reason})
            file.flush()
            counts[verdict.kind] += 1
            if verdict.fails or (verdict.kind == "refused" and not documented(case, verdict.reason)):
                print(f"{time.monotonic() - start:5.1f} s {verdict.kind} {verdict.reason} {verdict.off:g}\n    {case}", flush=True)
    print(dict(counts))


def rows_of(path: Path) -> list[dict[str, str]]:
    """A file of results."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(path: Path) -> None:
    """Counts of what came of the cases: refusals by where they are announced, failures by what is known of them."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows_of(path):
        case, kind = draw(int(row["seed"]), int(row["case"])), row["verdict"]
        known = "; ".join(name for name, concerns in KNOWN.items() if concerns(case))
        if kind == "refused":
            where = documented(case, row["reason"])
            counts["refused" if where else "refused, unannounced", where or f"{row['reason']} [{known}]"] += 1
        else:
            counts[kind, "" if kind == "equal" else known] += 1
    print("| verdict | | cases |\n|---|---|---|")
    for (kind, why), number in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"| {kind} | {why} | {number} |")


def choose(path: Path, seed: int, number: int = 100) -> tuple[int, ...]:
    """Two failures of every known combination, then what covers most pairs of features that are not covered yet, of 2,000 cases."""
    rows = [row for row in rows_of(path) if int(row["seed"]) == seed]
    cases = {index: draw(seed, index) for index in range(2000)}
    pairs = {index: set(itertools.combinations(sorted(case.features()), 2)) for index, case in cases.items()}
    wrong = [
        int(row["case"])
        for row in rows
        if row["verdict"] not in ("equal", "refused")
        or (row["verdict"] == "refused" and not documented(cases[int(row["case"])], row["reason"]))
    ]
    chosen: list[int] = []
    for name, concerns in KNOWN.items():
        found = [index for index in wrong if concerns(cases[index])]
        print(name, found, file=sys.stderr)
        alone = sorted(found, key=lambda index: sum(concerns(cases[index]) for concerns in KNOWN.values()))
        chosen += [index for index in alone if index not in chosen][:2]
    covered = set().union(*(pairs[index] for index in chosen))
    while len(chosen) < number:
        best = max((index for index in cases if index not in chosen), key=lambda index: len(pairs[index] - covered))
        chosen.append(best)
        covered |= pairs[best]
    print(f"{len(covered)} of {len(set().union(*pairs.values()))} pairs", file=sys.stderr)
    return tuple(sorted(chosen))


def alone(case: Case, *, shrink: bool) -> None:
    """One case, and the smallest like it."""
    with Pool() as pool:
        verdict = pool.judge(case)
        print(case, f"\n{verdict}")
        while shrink:
            smaller = next((other for other in simpler(case) if _same(pool.judge(other), verdict)), None)
            if smaller is None:
                break
            case = smaller
            print(case, flush=True)


def simpler(case: Case) -> Iterator[Case]:
    """The case without one thing that is not usual."""
    usual = Case()
    for item in dataclasses.fields(case):
        if item.name not in ("seed", "index", "strategy") and getattr(case, item.name) != getattr(usual, item.name):
            yield dataclasses.replace(case, **{item.name: getattr(usual, item.name)})
    if len(case.backwards) > 1:
        yield dataclasses.replace(case, backwards=case.backwards[-1:])
    for name, value in case.strategy.items():
        without = {key: other for key, other in case.strategy.items() if key != name}
        if f"{name}_configs" not in case.strategy:
            yield dataclasses.replace(case, strategy=without)
        if f"{name}_configs" in case.strategy:
            yield dataclasses.replace(case, strategy={key: other for key, other in without.items() if key != f"{name}_configs"})
        if isinstance(value, dict):
            for key in value:
                yield dataclasses.replace(case, strategy={**case.strategy, name: {k: v for k, v in value.items() if k != key}})


def _same(one: Verdict, other: Verdict) -> bool:
    return one.kind == other.kind and one.reason.partition("(")[0][:60] == other.reason.partition("(")[0][:60]


if __name__ == "__main__":
    main()
