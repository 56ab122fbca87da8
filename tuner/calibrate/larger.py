"""Larger: the time of a step on more GPUs than were measured, its interval, and whether more GPUs pay."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware import catalogue, gpu_named
from fleetbench.profile import profile_of, table_for
from tuner.calibrate.cells import GLOBAL_BATCH, GPUS, Cell
from tuner.calibrate.model import of_gpus
from tuner.calibrate.scaling import Forecast, Known, Scaling, Size
from tuner.simulated.candidates import PER_SAMPLES, with_compute

NODES, PER_NODE, BATCH = "cluster.nodes", "cluster.trainers_per_node", "workload.batch_size"
EFFICIENCY, EFFICIENCY_SD = 0.35, 0.5
"""Share of a data sheet's FLOP/s with tensor cores that training reaches, and the standard deviation of its
logarithm."""
MEASURED_SD = 0.05
"""Standard deviation of the logarithm of a step's work if a profile measured it, or a file declares it."""
SURE = 0.9
"""Least probability with which a size is called faster, or slower."""
FAR = 2.0
"""Factor by which the forecast of a measured size may be off. If it is off by more, no law explains the cells."""
SIZES = "sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Larger:
    """Answer: forecasts of measured and requested sizes, ordered by number of GPUs, and the law's parameters."""

    forecasts: tuple[Forecast, ...]
    measured: frozenset[Size]
    parameters: tuple[dict[str, Any], ...]
    known: Known
    samples: float
    """Number of samples that ``seconds`` and ``cost`` are for."""
    price: float | None

    def seconds(self, forecast: Forecast) -> tuple[float, ...]:
        """Return the seconds for ``samples`` at one size: low, median, high."""
        return tuple(self.samples / rate for rate in reversed(forecast.samples_per_s))

    def cost(self, forecast: Forecast) -> tuple[float, ...] | None:
        """Return the cost of ``samples`` at one size: low, median, high; None without a price."""
        hours = forecast.size.gpus / 3600
        return None if self.price is None else tuple(self.price * hours * took for took in self.seconds(forecast))

    def plain(self) -> dict[str, Any]:
        """Return the answer as JSON data. Triples are low, median and high of a 90 % interval for one run."""
        rows = [
            asdict(one) | {"measured": one.size in self.measured, "seconds": self.seconds(one), "cost": self.cost(one)}
            for one in self.forecasts
        ]
        return {SIZES: rows, "samples": self.samples, "parameters": self.parameters, "declared": asdict(self.known)}


def verdict(forecast: Forecast) -> str:
    """Describe whether a size trains more samples per second than the fastest measured one."""
    if SURE > forecast.faster > 1 - SURE:
        return f"not sure ({forecast.faster:.0%})"
    return f"{'yes' if forecast.faster >= SURE else 'no'} ({forecast.faster:.0%})"


def larger(
    experiment: Experiment, cells: Sequence[Cell], gpus: Sequence[int], known: Known, *,
    global_batch: int | None = None, batch: int | None = None,
) -> Larger:  # fmt: skip
    """Fit the law to the cells, and forecast a step on each number of GPUs.

    Args:
        experiment: the cluster, and in ``tune`` the samples and the price.
        cells: measurements, one per run.
        gpus: total numbers of GPUs to forecast.
        known: declared facts (``known_of``).
        global_batch: samples per step at the forecast sizes; default: as many per GPU as at the largest
            measured size.
        batch: samples per GPU in cells that do not state them.

    Raises:
        ConfigError: a cell or a number does not describe whole nodes, or a batch is missing.
    """
    measured: dict[Size, list[float]] = {}
    for cell in cells:
        size = _size_of(cell, experiment.cluster, batch)
        rate = cell.samples_per_s
        seconds = cell.seconds if rate is None else size.gpus * size.local_batch / rate
        assert seconds is not None, "a cell measured something"
        measured.setdefault(size, []).append(seconds)
    most = max(measured, key=lambda size: size.gpus)
    cluster, per_node = experiment.cluster, experiment.cluster.trainers_per_node
    per_node = per_node if _is_declared(cluster) else max(size.gpus_per_node for size in measured)
    posterior, asked = Scaling.of(measured, known), list[Size]()
    for size, runs in measured.items():
        if not 1 / FAR < posterior.forecast(size).step_s[1] / median(runs) < FAR:
            what = "is explained by no law beside the other rows and what is declared"
            hint = "look for a wrong unit: seconds are no milliseconds"
            raise ConfigError(what, f"the row of {size.gpus} GPUs", f"{median(runs):.3g} s", hint)
    for number in gpus:
        nodes = max(1, number // per_node)
        if number != nodes * min(number, per_node):
            hint = f"a multiple of the {per_node} GPUs of a node"
            raise ConfigError("must be whole nodes", "--gpus", str(number), hint)
        local = most.local_batch if global_batch is None else global_batch / number
        if local < 1:
            hint = f"--global-batch {number} or more, or fewer --gpus"
            raise ConfigError("leaves a GPU less than a sample", "--global-batch", str(global_batch), hint)
        asked.append(Size(nodes=nodes, gpus_per_node=min(number, per_node), local_batch=local))
    sizes = sorted({*measured, *asked}, key=lambda size: (size.gpus, size.local_batch))
    return Larger(
        forecasts=tuple(posterior.forecast(size) for size in sizes),
        measured=frozenset(measured),
        parameters=tuple(posterior.parameters()),
        known=known,
        samples=experiment.tune.samples or PER_SAMPLES,
        price=experiment.tune.price_per_trainer_hour,
    )


def _is_declared(cluster: Cluster) -> bool:
    return cluster.trainers_per_node > 1 or cluster.nodes > 1


def _size_of(cell: Cell, cluster: Cluster, batch: int | None) -> Size:
    """Return the size of a cell. Raises ``ConfigError`` for settings that do not describe one."""
    settings = cell.settings
    if cell.all_reduce_bytes is not None:
        hint = "drop the row; --fit takes it"
        raise ConfigError("is a bare all-reduce, and a forecast needs steps", cell.where, "all_reduce_bytes", hint)
    if other := settings.keys() - {NODES, PER_NODE, GPUS, BATCH, GLOBAL_BATCH}:
        hint = "columns gpus or nodes, gpus_per_node, local_batch or global_batch, seconds or samples_per_s"
        raise ConfigError("a size has no such column", cell.where, ", ".join(sorted(other)), hint)
    if wrong := [text for text in settings.values() if not text.isdecimal() or int(text) < 1]:
        raise ConfigError("must hold whole numbers from 1", cell.where, repr(wrong[0]), "for example 8")
    values = {key: int(text) for key, text in settings.items()}
    try:
        own = Cluster(nodes=values.get(NODES, cluster.nodes), trainers_per_node=values.get(PER_NODE, cluster.trainers_per_node))
        if GPUS in values:
            own = of_gpus(own, settings[GPUS], has_nodes=NODES in values)
    except ConfigError as error:
        raise ConfigError(error.what, f"{cell.where}, {error.where}", error.value, error.hint) from None
    if values.get(GPUS, 1) > 1 and PER_NODE not in values and not _is_declared(cluster):
        hint = "add a column gpus_per_node, or --set cluster.trainers_per_node=8"
        raise ConfigError("does not say how many GPUs a node has", cell.where, settings[GPUS], hint)
    local = values.get(BATCH, batch) if GLOBAL_BATCH not in values else values[GLOBAL_BATCH] / own.trainers
    if local is None:
        hint = "add a column local_batch or global_batch, or --set workload.batch_size=32"
        raise ConfigError("does not say how many samples a step has", cell.where, hint=hint)
    return Size(nodes=own.nodes, gpus_per_node=own.trainers_per_node, local_batch=float(local))


def known_of(experiment: Experiment, out: Path, parameters: float | None, flops: float | None, *, has_model: bool) -> Known:
    """Return what is declared. Raises ``ConfigError`` if ``flops`` are given without ``cluster.gpu``.

    Args:
        experiment: the cluster, and with ``has_model`` the model.
        out: the folder for an estimated profile.
        parameters: number of the model's parameters, with gradients of four bytes each.
        flops: floating-point operations of one sample's forward and backward.
        has_model: whether the experiment names the model. Its layers then give what ``parameters`` and
            ``flops`` leave open.
    """
    cluster, gpu = experiment.cluster, experiment.cluster.gpu
    inside, between, work_s, work_sd = None, None, None, EFFICIENCY_SD
    if cluster.intra is not None:
        inside = cluster.intra.carried(experiment.transport, between_nodes=False).bandwidth / 8
    elif gpu in catalogue().gpus:
        inside = catalogue().gpus[gpu].link / 8
    if cluster.inter is not None and cluster.node_bandwidth is not None:
        carried = cluster.inter.carried(experiment.transport, between_nodes=True).bandwidth / cluster.inter.bandwidth
        between = cluster.node_bandwidth * carried / 8
    nbytes: float | None = None
    if has_model:
        experiment = with_compute(experiment, out)
        table, profile = table_for(experiment), profile_of(experiment)
        nbytes = sum(gradient.nbytes for layer in table.layers for gradient in layer.gradients)
        work_s = (table.forward_ns + table.backward_ns + table.update) / 1e9 / experiment.workload.batch_size
        estimated = None if profile is None else profile.estimated
        work_sd = MEASURED_SD if estimated is None else estimated / 1.645
    if parameters is not None:
        nbytes = 4 * parameters
    if flops is not None:
        if gpu is None:
            raise ConfigError("needs the GPU", "--flops", f"{flops:g}", "--set cluster.gpu=H100, or a cluster.preset")
        rates = gpu_named(gpu, "cluster.gpu").flops_s
        work_s, work_sd = flops / (EFFICIENCY * rates.get("bf16", rates["fp16"])), EFFICIENCY_SD
    return Known(gradient_bytes=nbytes, inside=inside, between=between, work_s=work_s, work_sd=work_sd)
