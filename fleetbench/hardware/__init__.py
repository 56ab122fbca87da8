"""GPUs, nodes and networks by name, as ``catalogue.toml`` has them with the source of every figure."""

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
_FIGURES = re.compile(r"([\d.]+)\s*TFLOP/?s(?:/s)?\s*,\s*([\d.]+)\s*([GT]B)/s\s*,\s*([\d.]+\s*[GM]i?B)", re.IGNORECASE)
_RATES = {"GB": 1e9, "TB": 1e12}
Fabric = Literal["infiniband", "roce", "efa", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Config):
    """One GPU."""

    memory: Bytes
    memory_type: str
    """As tools that print a GPU's name may add it: ``HBM3``."""
    link: BitsPerSecond
    """Rate to the other GPUs of a node, each way."""
    link_by: Literal["fabric", "pcie", "host"] = "fabric"
    """Its carrier: NVLink or Infinity Fabric, PCIe, or PCIe through the host's memory."""
    memory_bandwidth: float
    """Bytes per second."""
    flops_s: dict[Precision, float]
    """What it computes a second at most; a precision that it does not have is missing."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Config):
    """One node."""

    gpu: str
    gpus: int = 8
    nics: int = 0
    rate: str = ""
    """Of one of ``nics``."""
    fabric: Fabric | None = None
    tcp: dict[str, str | int] = field(default_factory=dict)
    """Fields of a link by TCP that differ from those of ``nics``."""
    efa_us: float = 0.0
    """Microseconds that the EFA plugin tells NCCL that its network adds to a message."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue(Config):
    """All that has a name; the comments of ``catalogue.toml`` describe the tables."""

    infiniband: dict[str, BitsPerSecond]
    interface_gbps: tuple[int, ...]
    nccl: dict[str, str]
    latency_us: dict[str, float]
    loopback: dict[str, str | bool]
    gpus: dict[str, Gpu]
    nodes: dict[str, Node]


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    text = resources.files("fleetbench.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return decode(tomllib.loads(text), Catalogue, "")


def gpu_name(spelled: str, where: str) -> str:
    """The catalogue's name of a GPU in any usual spelling: ``h100``, ``A100-SXM4-80GB``, ``NVIDIA H100 80GB HBM3``.

    A spelling may say the vendor, that it is an SXM module, and its memory; whatever else it says, as ``NVL`` or another memory, makes it
    another GPU. Figures (``40 TFLOP/s, 900 GB/s, 24 GB``) are a GPU of one's own, and their own name. Raises ``ConfigError`` for a name
    that no GPU has; ``where`` is what named it.
    """
    if _FIGURES.fullmatch(spelled.strip()):
        return spelled.strip()
    words, same = {*_words(spelled)}, list[str]()
    for name, gpu in catalogue().gpus.items():
        own, memory = {*_words(name)}, {*_words(format_size(gpu.memory))}
        if own - memory <= words <= {*own, *memory, gpu.memory_type.lower()}:
            same.append(name)
    if not same:
        raise ConfigError("no such GPU", where, repr(spelled), gpu_hint(spelled))
    return min(same, key=lambda name: len({*_words(name)} - words))


def gpu_hint(spelled: str) -> str:
    """Which GPUs there are, those with a name like ``spelled`` first."""
    gpus = catalogue().gpus
    near = difflib.get_close_matches("".join(_words(spelled)[:1]).upper(), gpus, n=3)
    nearest = f"nearest by name: {', '.join(near)}; " if near else ""
    known = ", ".join(f"{name} ({format_size(gpu.memory)})" for name, gpu in gpus.items())
    return f'{nearest}known: {known}; or give figures, as "40 TFLOP/s, 900 GB/s, 24 GB"'


def _words(name: str) -> list[str]:
    """Words of a GPU's name in small letters, without those that tell nothing here."""
    words = re.sub(r"(\d)\s*gb?\b", r"\1gb", re.sub(r"[\s_-]+", " ", name.strip().lower())).split(" ")
    return [word for word in words if not re.fullmatch(r"nvidia|tesla|geforce|amd|instinct|generation|oam|sxm\d?", word)]


def gpu_named(name: str, where: str) -> Gpu:
    """The GPU of a name, or of figures: what it computes in every precision, its memory's rate and size; PCIe 4.0 links it.

    Raises ``ConfigError`` for a name that no GPU has; ``where`` is what named it.
    """
    known = gpu_name(name, where)
    if (figures := _FIGURES.fullmatch(known)) is None:
        return catalogue().gpus[known]
    flops, moved, size = float(figures[1]) * 1e12, float(figures[2]) * _RATES[figures[3].upper()], figures[4]
    fp64: dict[Precision, float] = {"fp64": flops / 2, "fp32": flops, "tf32": flops, "fp16": flops, "bf16": flops}
    link = parse_bandwidth("252 Gbit/s")
    return Gpu(
        memory=parse_size(size), memory_type="", link=link, link_by="pcie", memory_bandwidth=moved, flops_s=fp64, source="figures given"
    )
