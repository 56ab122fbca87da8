"""Presets: against figures copied from the vendors' documents, and against files that declare the same by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware import catalogue, gpu_name, gpu_named

NCCL: dict[str, Any] = {"backend": "nccl", "device": "cuda"}
DOCS = Path(__file__).parents[2] / "docs" / "presets.md"


def of(preset: str, run: dict[str, Any] | None = None, **cluster: Any) -> Experiment:
    """The experiment of a preset."""
    return Experiment.from_dict({"cluster": {"preset": preset, **cluster}, "run": run or {}})


SPELLED = {
    "P100": ("Tesla P100-SXM2-16GB",),
    "P100-PCIe": ("Tesla P100-PCIE-16GB",),
    "V100-16GB": ("Tesla V100-SXM2-16GB",),
    "V100-PCIe": ("Tesla V100-PCIE-32GB",),
    "V100-PCIe-16GB": ("Tesla V100-PCIE-16GB",),
    "A100-PCIe-40GB": ("NVIDIA A100-PCIE-40GB",),
    "A30": ("NVIDIA A30",),
    "A10G": ("NVIDIA A10G",),
    "A40": ("NVIDIA A40",),
    "L40": ("NVIDIA L40",),
    "H100-NVL": ("NVIDIA H100 NVL",),
    "H200-NVL": ("NVIDIA H200 NVL",),
    "GH200-144GB": ("NVIDIA GH200 144G HBM3e",),
    "B300": ("NVIDIA B300 SXM6 AC",),
    "GB300": ("NVIDIA GB300",),
    "GB10": ("NVIDIA GB10", "DGX Spark", "NVIDIA DGX Spark"),
    "MI210": ("AMD Instinct MI210",),
    "MI250X": ("AMD INSTINCT MI250X (MCM) OAM AC MBA",),
    "MI325X": ("AMD Instinct MI325X",),
    "MI350X": ("AMD Instinct MI350X",),
    "MI355X": ("AMD Instinct MI355X",),
    "RTX A5000": ("NVIDIA RTX A5000", "A5000"),
    "RTX A6000": ("NVIDIA RTX A6000", "A6000"),
    "RTX PRO 6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    "RTX 2080 Ti": ("NVIDIA GeForce RTX 2080 Ti",),
    "RTX 3080": ("NVIDIA GeForce RTX 3080",),
    "RTX 3090 Ti": ("NVIDIA GeForce RTX 3090 Ti",),
    "RTX 4080": ("NVIDIA GeForce RTX 4080",),
    "RTX 5080": ("NVIDIA GeForce RTX 5080",),
    "V100": ("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "V100-SXM2", "V100 32GB HBM2"),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "A100 40GB", "a100_40gb", "A100-40G"),
    "A100": ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", "A100-SXM4-80GB", "A100 80 GB", "nvidia-a100-80gb"),
    "H100": ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3", "H100 SXM", "H100-SXM5-80GB", "nvidia-h100-80gb"),
    "H200": ("NVIDIA H200", "H200 SXM 141GB", "NVIDIA H200 141GB HBM3e"),
    "B200": ("NVIDIA B200", "B200-SXM6", "B200 180GB"),
    "A100-PCIe": ("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"),
    "H100-PCIe": ("NVIDIA H100 PCIe", "H100 PCIe 80GB HBM2e"),
    "GH200": ("GH200 96GB HBM3", "NVIDIA GH200 480GB"),
    "GB200": ("NVIDIA GB200",),
    "MI300X": ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    "T4": ("Tesla T4", "NVIDIA T4"),
    "A10": ("NVIDIA A10", "NVIDIA A10 24GB"),
    "L4": ("NVIDIA L4",),
    "L40S": ("NVIDIA L40S", "NVIDIA-L40S"),
    "RTX 6000 Ada": ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", "RTX-3090"),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", "rtx_4090"),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", "RTX 5090 32GB"),
}
"""What ``nvidia-smi``, Kubernetes' node labels and data sheets call them."""
OTHERS = ("H800", "A800-SXM4-80GB", "H20", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "A100 64GB")
OTHERS += ("RTX", "Quadro RTX 6000", "RTX 6000", "H100 80GB HBM2e", "RTX PRO 6000 Max-Q", "NVIDIA", "", "H100x8", "900 GB/s, 24 GB")


@pytest.mark.slow
def test_gpus_are_known_by_every_usual_name() -> None:
    """Every GPU of the catalogue by its name in either case and as tools print it, in a file, as a preset, and by ``gpu_named``."""
    assert SPELLED.keys() == catalogue().gpus.keys()
    for name, spellings in SPELLED.items():
        for spelled in (name, name.lower(), f"NVIDIA {name}", f" {name} ", *spellings, *map(str.lower, spellings)):
            assert gpu_name(spelled, "--gpu") == name
            assert gpu_named(spelled, "--gpu") == catalogue().gpus[name]
            assert Experiment.from_dict({"cluster": {"gpu": spelled}}).cluster.gpu == name
            assert of(f"2 x 8 {spelled.strip()}, 400 Gbps per NIC", NCCL) == of(f"2 x 8 {name}, 400G per NIC", NCCL)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("40 TFLOP/s", "three figures"),
        ("40 TFLOP/s, 900 GB/s, 24 GB, 2 GB", "three figures"),
        ("0 TFLOP/s, 900 GB/s, 24 GB", "no GPU has these figures"),
        ("40 TFLOP/s, 0 GB/s, 24 GB", "no GPU has these figures"),
        ("40 TFLOP/s, 900 TB/s, 24 GB", "no GPU has these figures"),
        ("40 TFLOP/s, 900 GB/s, 24 MB", "no GPU has these figures"),
    ],
)
def test_figures_that_no_gpu_has_are_refused(spelled: str, message: str) -> None:
    """One that is missing by its name; and a memory that is not read in 1 ms to 10 s: a wrong unit."""
    with pytest.raises(ConfigError, match=message) as caught:
        gpu_name(spelled, "--gpu")
    assert gpu_named(str(caught.value.hint).split('"')[1], "--gpu").memory == 24 * 10**9


def test_a_gpu_of_ones_own_has_the_figures_given() -> None:
    """TFLOP/s, the memory's rate and its size, in any usual spelling; the experiment's file keeps them."""
    spelled = "40 TFLOP/s, 1.5 TB/s, 24 GB"
    found = gpu_named(spelled, "--gpu")
    assert (found.flops_s["bf16"], found.memory_bandwidth, found.memory) == (40e12, 1.5e12, 24 * 10**9)
    assert gpu_named("40 tflop/s,1500 GB/s,24GB", "--gpu") == found
    experiment = Experiment.from_dict({"cluster": {"gpu": spelled}})
    assert Experiment.from_dict(tomllib.loads(experiment.to_toml())) == experiment


def test_cards_without_nvlink_meet_over_pcie() -> None:
    """PCIe 4.0 has 16 lanes of 16 Gbit/s, of which 128 of 130 bits are data; GeForce cards reach each other through the host's memory."""
    lanes = 16 * 16 * 128 / 130
    for name, share in (("L40S", 1.0), ("RTX 4090", 0.5), ("L40S, no P2P", 0.5), ("L40S, no P2P, 100G per NIC", 0.5)):
        link = of(f"1 x 4 {name}", NCCL).cluster.intra
        assert link is not None
        assert link.bandwidth / 1e9 == pytest.approx(share * lanes, rel=0.01)
        assert link.framing == "none"
    for name, gpu in catalogue().gpus.items():
        assert 0 < gpu.flops_s["fp32"] <= gpu.flops_s["fp16"], name
        assert 25 < gpu.flops_s["fp16"] / gpu.memory_bandwidth < 500, name
        assert gpu.flops_s["fp32"] <= gpu.flops_s.get("tf32", gpu.flops_s["fp32"]) <= gpu.flops_s["fp16"], name
        assert gpu.flops_s.get("bf16", gpu.flops_s["fp16"]) == gpu.flops_s["fp16"], name
        assert 0.01 < gpu.memory / gpu.memory_bandwidth < 0.5, name


HOPPER = {"gpu": "H100", "collective": "nccl-hopper", "intra": {"bandwidth": "450 GB/s", "latency": "3.4 us"}}
DGX = {"cores_per_node": 112}
EIGHT = {"nodes": 8, "trainers_per_node": 8, "nics_per_node": 8, **HOPPER, "inter": {"bandwidth": "400 Gbit/s"}}


@pytest.mark.parametrize(
    ("preset", "run", "declared"),
    [
        ("8 x 8 H100, 400G per NIC", NCCL, EIGHT),
        ("8 x 8 h100, 3200G per node", NCCL, EIGHT),
        ("8 x 8 H100, 8 x 400 Gbit/s", NCCL, EIGHT),
        ("8 x 8 H100, NDR per NIC", NCCL, EIGHT),
        ("8 x DGX H100", NCCL, EIGHT | DGX),
        ("8 x 8 H100, 400G per node", NCCL, EIGHT | {"nics_per_node": 1}),
        ("8 x 8 H100, 4 x 100G", NCCL, EIGHT | {"nics_per_node": 4, "inter": {"bandwidth": "100 Gbit/s"}}),
        ("16 x 1 V100, Ethernet 10G", {}, {"nodes": 16, "gpu": "V100", "inter": {"bandwidth": "10 Gbit/s", "latency": "50 us"}}),
        (
            "2 x loopback",
            {},
            {"trainers_per_node": 2, "intra": {"bandwidth": "5.48 Gbit/s", "latency": "388 us", "payload": True}},
        ),
    ],
)
def test_a_preset_is_the_fields_that_it_stands_for(preset: str, run: dict[str, Any], declared: dict[str, Any]) -> None:
    """The same experiment, digest and resolved file as those of a file that declares the fields."""
    found, by_hand = of(preset, run), Experiment.from_dict({"cluster": declared, "run": run})
    assert found == by_hand
    assert found.digest() == by_hand.digest()
    assert "preset" not in tomllib.loads(found.to_toml())["cluster"]


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("8 x p5.48large", "Did you mean 'p5.48xlarge'"),
        ("8 x DGX H10", "Did you mean 'DGX H100'"),
        ("8 x 8 H101, 400G per NIC", "nearest by name: H100"),
        ("8 x 8 H800, 400G per NIC", "nearest by name: H200, H100"),
        ("1 x 8 H100, no P2P", "H100 has a fabric"),
        ("8 x H100, 400G", "8 x 1 H100"),
        ("8 x 8 H100, 70G per node", "say how many"),
        ("8 x 1 H100, HDR 400G", "not a network"),
        ("8 x 1 H100, 400Q", "not a bandwidth"),
        ("8 x 1 H100, fast", "not a network"),
        ("", "no cluster, node or GPU"),
        ("8 x 0 H100, 70G per node", "no cluster, node or GPU"),
        ("8 x 8 H100, 0 x 400G", "not a network"),
        ("8 x 1 H100, 0G", "must be above 0 bit/s"),
        ("0 x p5.48xlarge", "no cluster, node or GPU"),
    ],
)
def test_what_names_nothing_is_refused(preset: str, message: str) -> None:
    """With the nearest name, or how it is written."""
    with pytest.raises(ConfigError, match=r"^cluster\.") as caught:
        of(preset)
    assert message in str(caught.value)


def test_what_the_file_declares_itself_counts() -> None:
    """Fields, and single keys of a link; a link in bytes that arrive has no framing left."""
    cluster = of("8 x p5.48xlarge", NCCL, nodes=16, nics_per_node=4, inter={"bandwidth": "100 Gbit/s", "payload": True}).cluster
    assert cluster.inter is not None
    assert (cluster.nodes, cluster.trainers_per_node, cluster.nics_per_node) == (16, 8, 4)
    assert (cluster.inter.bandwidth, cluster.inter.latency, cluster.inter.framing) == (10**11, 75_000, None)
    intra = of("2 x loopback", intra={"framing": "tcp", "mtu": 9000}).cluster.intra
    assert intra is not None
    assert (intra.bandwidth, intra.framing, intra.mtu, intra.payload) == (5_480_000_000, "tcp", 9000, None)


def test_the_page_has_every_node() -> None:
    """docs/presets.md has a row a node, with its interfaces."""
    text = DOCS.read_text(encoding="utf-8")
    for name, node in catalogue().nodes.items():
        assert f"| `{name}` | {node.gpus} {node.gpu} | {node.nics} x {node.rate.removesuffix(' Gbit/s')} |" in text
