"""How well do all-reduces of up to 64 MiB predict those of 128 MiB to 1 GiB? Chooses a form by V100's sizes up to 64 MiB.

Run from the repository's root: ``python reports/nccl_model/predict.py``. Prints the tables of README.md and draws ``errors.png``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from forms import GENERATIONS, GPUS, MIB, Form, errors, fit, forms, score, table

from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.network.links import Links
from sim.network.measured import Times
from sim.network.nccl import GENERATIONS as CONSTANTS
from sim.network.nccl import Nccl

FIGURE = Path(__file__).parent / "errors.png"
BARE = Form("line", MIB)
HINDSIGHT = Form("line + root + loops", 8 * MIB, from_switch=True)
NVLINKS = {"v100": 6, "a100": 12}
"""Of a GPU; NCCL counts 20 GB/s for each."""


def main() -> None:
    """Everything."""
    scored = sorted(((np.mean([score(form, "v100", gpus) for gpus in GPUS]), form) for form in forms()), key=lambda one: one[0])
    print(f"{len(scored)} forms; by the mean error on V100 of the next 8 MiB behind 40, 48 and 56 MiB:")
    for own, form in scored[:5]:
        print(f"- {own:.3%}: {form}")
    chosen = scored[0][1]
    shown = {"chosen up to 64 MiB": chosen, "bare": BARE, "with hindsight": HINDSIGHT}
    by_errors = min(forms(), key=lambda form: np.mean([_mean(errors(form, "v100", gpus)[1]) for gpus in GPUS]))
    print(f"\nThe form with the least error on V100 above 128 MiB, which is no choice but a look at the answer: {by_errors}")
    print("\n| GPUs | " + " | ".join(f"{name}: {form}" for name, form in shown.items()) + " |\n|---" * (len(shown) + 1) + "|")
    for generation in GENERATIONS:
        for gpus in GPUS:
            cells = [_cell(errors(form, generation, gpus)[1]) for form in shown.values()]
            print(f"| {gpus} {generation.upper()} | " + " | ".join(cells) + " |")
    print("\n| GPUs | alpha, us | GB/s beside loops | loops of, MiB | us a loop | gamma, us a sqrt(MiB) |\n|---|---|---|---|---|---|")
    for generation in GENERATIONS:
        for gpus in GPUS:
            for form in (chosen, HINDSIGHT):
                _coefficients(generation, gpus, form)
    passed = [form for form in forms() if all(_meets(errors(form, generation, gpus)[1]) for generation in GENERATIONS for gpus in GPUS)]
    print(f"\nForms that meet both limits on all six tables: {len(passed)} of {len(scored)}")
    _as_table()
    _as_nccl()
    _draw(shown)


def _mean(own: np.ndarray) -> float:
    return float(np.abs(own).mean())


def _meets(own: np.ndarray) -> bool:
    return _mean(own) <= 0.03 and float(np.abs(own).max()) <= 0.06


def _cell(own: np.ndarray) -> str:
    return f"{_mean(own):.2%}, at most {np.abs(own).max():.2%}{'' if _meets(own) else ' **missed**'}"


def _coefficients(generation: str, gpus: int, form: Form) -> None:
    sizes, times = table(generation, gpus)
    found = fit(form, sizes, times)
    alpha_ns, beta = found.coefficients[:2]
    root = found.coefficients[2] * MIB**0.5 / 1e3 if "root" in form.terms else 0.0
    loops = found.coefficients[-1] / 1e3 if "loops" in form.terms else 0.0
    print(f"| {gpus} {generation.upper()} | {alpha_ns / 1e3:.1f} | {1 / beta:.1f} | {found.loop / MIB:.0f} | {loops:.1f} | {root:.1f} |")


def _as_table() -> None:
    """What ``cluster.collective = "measured"`` makes of the powers of two, on all other sizes."""
    print("\n| GPUs | sizes kept | mean error between them | largest |\n|---|---|---|---|")
    for generation in GENERATIONS:
        for gpus in GPUS:
            sizes, times = table(generation, gpus)
            kept = np.log2(sizes) % 1 == 0
            found = Times((int(size), round(ns)) for size, ns in zip(sizes[kept], times[kept], strict=True))
            own = np.array([float(found.ns(int(size))) for size in sizes[~kept]]) / times[~kept] - 1
            print(f"| {gpus} {generation.upper()} | {kept.sum()} | {_mean(own):.2%} | {np.abs(own).max():.2%} |")


def _as_nccl() -> None:
    """NCCL's own cost model, with nothing fitted."""
    print("\n| GPUs | NCCL's model, 1 to 64 MiB | 128 MiB to 1 GiB |\n|---|---|---|")
    for generation, name in (("v100", "nccl-volta"), ("a100", "nccl-ampere")):
        for gpus in GPUS:
            sizes, times = table(generation, gpus)
            model = Nccl(CONSTANTS[name], "all_reduce", range(gpus), _links(gpus, 20 * NVLINKS[generation]))
            own = np.array([float(model.cost(int(size)).total_ns) for size in sizes]) / times - 1
            small, large = own[sizes <= 64 * MIB], own[sizes >= 128 * MIB]
            cells = [f"{part.mean():+.1%} in the mean, {_mean(part):.1%} off" for part in (small, large)]
            print(f"| {gpus} {generation.upper()} | " + " | ".join(cells) + " |")


def _links(gpus: int, gbytes_per_s: int) -> Links:
    return Links(trainers_per_node=gpus, intra=Link(bandwidth=BitsPerSecond(gbytes_per_s * 8 * 10**9), latency=Nanoseconds(0)), inter=None)


def _draw(shown: dict[str, Form]) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained", sharex=True)
    for row, generation in zip(axes, GENERATIONS, strict=True):
        for one, gpus in zip(row, GPUS, strict=True):
            for (name, form), style in zip(shown.items(), ("-", "--", ":"), strict=True):
                sizes, own = errors(form, generation, gpus)
                one.plot(sizes / MIB, 100 * own, style, lw=1.2, label=name)
            one.axhspan(-6, 6, color="green", alpha=0.08, label="at most 6 %")
            one.axhline(0, color="black", lw=0.6)
            one.set(title=f"{gpus} {generation.upper()}", ylim=(-13, 13))
            one.grid(alpha=0.3)
    figure.supxlabel("size, MiB")
    figure.supylabel("error of the prediction, %")
    axes[0][0].legend(fontsize=8, ncols=2)
    figure.savefig(FIGURE, dpi=100)


if __name__ == "__main__":
    main()
