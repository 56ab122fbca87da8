"""GPUs, nodes and networks by name, from ``catalogue.toml``, which has a source for every figure."""

import difflib
import functools
import re
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from fleetbench.config import Config, decode
from fleetbench.errors import ConfigError
from fleetbench.quantities import BitsPerSecond, Bytes, format_size, parse_bandwidth, parse_size

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
_FIGURES = re.compile(r"([\d.]+) *TFLOP/s, *([\d.]+) *([GT])B/s, *([\d.]+ *[GMT]i?B)", re.IGNORECASE)
_RATES = {"G": 1e9, "T": 1e12}
_EXAMPLE = "40 TFLOP/s, 900 GB/s, 24 GB"
Fabric = Literal["infiniband", "roce", "efa", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Config):
    """One GPU."""

    also: tuple[str, ...] = ()
    """Other names that tools print."""
    nccl: str | None = None
    """Simulated collective with NCCL's constants for its generation; none if NCCL has no such constants."""
    memory: Bytes
    """Size of its memory."""
    memory_type: str
    """Type of memory, as tools may add it to a GPU's name: ``HBM3``."""
    link: BitsPerSecond
    """Rate to the other GPUs of a node, in each direction."""
    link_by: Literal["fabric", "pcie", "host"] = "fabric"
    """Carrier of this link: NVLink or Infinity Fabric, PCIe, or PCIe through the host's memory."""
    memory_bandwidth: float
    """Rate of its memory in bytes per second."""
    flops_s: dict[Precision, float]
    """Peak FLOP/s by precision. A precision that the GPU does not support has no entry."""
    source: str
    """Source of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Config):
    """One node."""

    gpu: str
    """Name of its GPUs."""
    gpus: int = 8
    """Number of GPUs."""
    cores: int = 0
    """Number of processors as the system counts them; 0 if unknown."""
    has_p2p: bool = True
    """Whether its GPUs can access each other's memory over PCIe."""
    nics: int = 0
    """Number of network interfaces."""
    rate: str = ""
    """Rate of each network interface."""
    fabric: Fabric | None = None
    """Kind of the network; none if unknown."""
    tcp: dict[str, str | int] = field(default_factory=dict)
    """Fields of a TCP link that differ from those of ``nics``."""
    efa_us: float = 0.0
    """Microseconds that the EFA plugin reports to NCCL as its network's latency per message."""
    source: str = ""
    """Source of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue(Config):
    """Everything that has a name; the comments of ``catalogue.toml`` describe the tables."""

    infiniband: dict[str, BitsPerSecond]
    interface_gbps: tuple[int, ...]
    latency_us: dict[str, float]
    loopback: dict[str, str | bool]
    gpus: dict[str, Gpu]
    nodes: dict[str, Node]


@functools.cache
def catalogue() -> Catalogue:
    """Return the catalogue, which is read once."""
    text = resources.files("fleetbench.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return decode(tomllib.loads(text), Catalogue, "")


def gpu_name(spelled: str, where: str) -> str:
    """Return the catalogue's name of a GPU in any common spelling.

    Examples are ``h100``, ``A100-SXM4-80GB`` and ``NVIDIA H100 80GB HBM3``. A spelling may include the
    vendor, the SXM form and the memory; anything else, such as another memory size, makes it another GPU.
    Figures (``40 TFLOP/s, 900 GB/s, 24 GB``) describe a custom GPU, and are its name. Raises ``ConfigError``
    for an unknown name, and for incomplete or impossible figures; ``where`` is the setting that named it.
    """
    if "flop" in spelled.lower():
        _of_figures(spelled, where)
        return spelled.strip()
    words, same = {*_words(spelled)}, dict[str, int]()
    for name, gpu in catalogue().gpus.items():
        memory = {*_words(format_size(gpu.memory))}
        for own in ({*_words(called)} for called in (name, *gpu.also)):
            if own - memory <= words <= {*own, *memory, gpu.memory_type.lower()}:
                same[name] = min(len(own - words), same.get(name, len(own)))
    if not same:
        raise ConfigError("no such GPU", where, repr(spelled), gpu_hint(spelled))
    return min(same, key=lambda name: same[name])


def gpu_hint(spelled: str) -> str:
    """List the known GPUs, those with a name like ``spelled`` first."""
    gpus = catalogue().gpus
    near = difflib.get_close_matches("".join(_words(spelled)[:1]).upper(), gpus, n=3)
    nearest = f"nearest by name: {', '.join(near)}; " if near else ""
    known = ", ".join(f"{name} ({format_size(gpu.memory)})" for name, gpu in gpus.items())
    return f'{nearest}known: {known}; or give figures, as "{_EXAMPLE}"'


def _words(name: str) -> list[str]:
    """Return the words of a GPU's name in lower case, without words that do not distinguish GPUs."""
    words = re.sub(r"(\d)\s*gb?\b", r"\1gb", re.sub(r"[\s_()-]+", " ", name.lower()).strip()).split(" ")
    noise = r"nvidia|tesla|geforce|amd|instinct|generation|blackwell|workstation|server|edition|oam|mcm|mba|[al]c|sxm\d?"
    return [word for word in words if not re.fullmatch(noise, word)]


def gpu_named(name: str, where: str) -> Gpu:
    """Return the GPU with this name or these figures.

    Figures hold for every precision, and PCIe 4.0 links it.

    Raises ``ConfigError`` for an unknown name; ``where`` is the setting that named it.
    """
    known = gpu_name(name, where)
    return catalogue().gpus.get(known) or _of_figures(known, where)


def _of_figures(spelled: str, where: str) -> Gpu:
    """Return a custom GPU. Raises ``ConfigError`` for incomplete or impossible figures."""
    match = _FIGURES.fullmatch(spelled.strip())
    if match is None:
        what = "a GPU has three figures: its peak rate, its memory's rate, and its memory's size"
        raise ConfigError(what, where, repr(spelled), f'write "{_EXAMPLE}"')
    flops, moved, memory = float(match[1]) * 1e12, float(match[2]) * _RATES[match[3].upper()], parse_size(match[4])
    if not (moved and 1 <= flops / moved <= 10_000 and 1e-3 <= memory / moved <= 10):
        what = "no GPU has these figures: 1 to 10,000 FLOP for each byte that its memory moves, and 1 ms to 10 s to read it all"
        raise ConfigError(what, where, repr(spelled), f'look at the units, as in "{_EXAMPLE}"')
    every: dict[Precision, float] = {"fp64": flops / 2, "fp32": flops, "tf32": flops, "fp16": flops, "bf16": flops}
    return Gpu(
        memory=memory,
        memory_type="",
        link=parse_bandwidth("252 Gbit/s"),
        link_by="pcie",
        memory_bandwidth=moved,
        flops_s=every,
        source="figures given",
    )
