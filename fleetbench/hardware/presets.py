"""Clusters by name: ``cluster.preset`` of a file, and the fields of ``[cluster]`` that it stands for.

A preset names nodes (``8 x p5.48xlarge``, ``4 x DGX A100``), GPUs and a network (``8 x 8 H100, 400G per
NIC``, ``16 x 1 V100, Ethernet 10G``, ``1 x 4 RTX 4090``, ``1 x 8 A10G, no P2P``) or processes on one machine
(``2 x loopback``). Its fields depend on the backend: NCCL (``run.backend = "nccl"``, or a simulated ``nccl-``
collective) uses NVLink and all interfaces by RDMA; gloo copies through the host's memory and uses TCP over
one interface, with a cloud's limit per flow.

NCCL's latencies are those of its own cost model (``catalogue.toml``). A simulated ``nccl-`` collective
already includes them, so only EFA's addition is declared.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import tomli_w

from fleetbench.config import nearest
from fleetbench.errors import ConfigError
from fleetbench.hardware import Fabric, Node, catalogue, gpu_hint, gpu_name, gpu_named
from fleetbench.quantities import BitsPerSecond, format_bandwidth, parse_bandwidth

_COUNTED = re.compile(r"(?:([1-9]\d*)\s*x\s+)?(.+)", re.IGNORECASE)
_GPUS = re.compile(r"(?:([1-9]\d*)\s+)?([a-z][^,]*?)(?:\s*,\s*(.*))?", re.IGNORECASE)
_P2P = re.compile(r"(no p2p)?[\s,]*(.*)", re.IGNORECASE)
_NETWORK = re.compile(
    r"(?:(?P<nics>[1-9]\d*)\s*x\s+)?(?P<fabric>ethernet|infiniband|roce)?\s*"
    r"(?:(?P<generation>[FEHNX]DR)|(?P<rate>[\d.]+\s*[a-z/]+))\s*(?:per\s+(?P<per>nic|node))?",
    re.IGNORECASE,
)


Expansion = tuple[dict[str, Any], list[str]]
"""Fields of a preset as TOML data; and the sources of the figures, including assumptions."""


def expanded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an undecoded experiment with the fields of its ``cluster.preset``.

    The file's own fields take precedence.

    Links are merged key by key. Raises ``ConfigError`` for an unknown or ambiguous preset.
    """
    found = _expansion(data)
    if found is None:
        return data
    fields, _ = found
    own = {name: value for name, value in data["cluster"].items() if name != "preset"}
    links = {name: _merged(fields[name], own[name]) for name in ("intra", "inter") if name in own and name in fields}
    return {**data, "cluster": {**fields, **own, **links}}


def described(data: Mapping[str, Any]) -> str | None:
    """Describe a preset's fields next to the file's own, and their sources; none without a preset.

    Raises as ``expanded``.
    """
    found = _expansion(data)
    if found is None:
        return None
    own, resolved, (fields, notes) = data["cluster"], expanded(data)["cluster"], found
    lines = [f"{name} = {_inline(resolved[name])}" for name in fields if isinstance(own.get(name), Mapping | None)]
    return "\n  ".join([f"cluster.preset = {_inline(own['preset'])} stands for", *lines, *notes])


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return tomli_w.dumps({"value": value}).partition("= ")[2].strip()


def _merged(preset: Mapping[str, Any], own: Any) -> Any:
    """Merge a preset's link with a file's own keys, and drop the preset's keys that these contradict."""
    if not isinstance(own, Mapping):
        return own
    contradicted = set()
    if own.get("payload"):
        contradicted = {"framing", "mtu"}
    elif "framing" in own or "mtu" in own:
        contradicted = {"payload", "mtu"}
    return {**{key: value for key, value in preset.items() if key not in contradicted}, **own}


def _expansion(data: Mapping[str, Any]) -> Expansion | None:
    cluster, run = data.get("cluster"), data.get("run")
    if not isinstance(cluster, Mapping) or "preset" not in cluster:
        return None
    text, collective = cluster["preset"], cluster.get("collective")
    if not isinstance(text, str):
        raise ConfigError("expected text", "cluster.preset", repr(text), 'for example preset = "8 x p5.48xlarge"')
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        raise _unknown(text, text)
    nodes, body = int(match[1] or 1), match[2]
    backend = run.get("backend") if isinstance(run, Mapping) else None
    is_modelled = isinstance(collective, str) and collective.startswith("nccl-")
    is_nccl = is_modelled or backend == "nccl"
    if _plain(body) == "loopback":
        if is_nccl:
            hint = 'name GPUs: preset = "1 x 8 H100"'
            raise ConfigError("loopback is gloo's: NCCL sends over NVLink inside a machine", "cluster.preset", repr(text), hint)
        links = "links: medians of this project's own profiles on two cores (reports/profile)"
        return {"nodes": 1, "trainers_per_node": nodes, "intra": dict(catalogue().loopback)}, [links]
    node = next((node for name, node in catalogue().nodes.items() if _plain(name) == _plain(body)), None) or _gpus(text, nodes, body)
    fields, notes = _by_nccl(node, collective) if is_nccl else _by_gloo(node)
    source = [f"nodes: {node.source}"] if node.source else []
    fields |= {"cores_per_node": node.cores} if node.cores else {}
    return {"nodes": nodes, "trainers_per_node": node.gpus, "gpu": node.gpu, **fields}, source + notes


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _unknown(text: str, name: str) -> ConfigError:
    nodes = ["loopback", *catalogue().nodes]
    known = f"GPUs: {gpu_hint(name)}; nodes: {', '.join(nodes)}"
    hint = nearest(name, nodes).removeprefix(". ") or f'such as "8 x p5.48xlarge" or "8 x 8 H100, 400G per NIC"; {known}'
    return ConfigError(f"no cluster, node or GPU is called {name!r}", "cluster.preset", repr(text), hint)


def _gpus(text: str, nodes: int, body: str) -> Node:
    match = _GPUS.fullmatch(body)
    try:
        gpu = gpu_name(match[2] if match else body, "cluster.preset")
    except ConfigError:
        raise _unknown(text, match[2] if match else body) from None
    assert match is not None, "a name begins with a letter"
    if match[1] is None:
        hint = f'write "{nodes} x 1 {gpu}" for one GPU a node, or "1 x {nodes} {gpu}" for one node'
        raise ConfigError("says nodes, and not how many GPUs each has", "cluster.preset", repr(text), hint)
    gpus, (apart, network) = int(match[1]), _P2P.fullmatch(match[3] or "").groups()  # type: ignore[union-attr]  # it matches all
    if apart and gpu_named(gpu, "cluster.preset").link_by == "fabric":
        raise ConfigError(f"{gpu} has a fabric, and no rate of PCIe here", "cluster.preset", repr(text), "leave no P2P out")
    nics, rate, fabric = _network(text, gpus, network) if network else (0, "", None)
    return Node(gpu=gpu, gpus=gpus, has_p2p=not apart, nics=nics, rate=rate, fabric=fabric)


def _network(text: str, gpus: int, network: str) -> tuple[int, str, Fabric | None]:
    """Return the number of interfaces per node, the rate of one, and the fabric."""
    match = _NETWORK.fullmatch(network.strip())
    usage = 'for example "Ethernet 10G", "400G per NIC", "3200G per node", "8 x 400G" or "HDR per NIC"'
    if match is None:
        raise ConfigError("not a network", "cluster.preset", repr(text), usage)
    generation, per = (match["generation"] or "").upper(), (match["per"] or "").lower()
    rate = catalogue().infiniband[generation] if generation else _rate(text, match["rate"])
    fabric: Any = "infiniband" if generation else match["fabric"] and match["fabric"].lower()
    if match["nics"]:
        return int(match["nics"]), format_bandwidth(rate), fabric
    if gpus > 1 and not per:
        spelled, total = text.strip(), format_bandwidth(rate * gpus)
        hint = f'write "{spelled} per NIC" ({gpus} NICs, {total} a node) or "{spelled} per node"'
        raise ConfigError("the rate can be that of a NIC or that of a node", "cluster.preset", repr(text), hint)
    if per == "nic" or gpus == 1:
        return gpus, format_bandwidth(rate), fabric
    rates = catalogue().interface_gbps
    if generation or Fraction(rate, 10**9) in rates:
        return 1, format_bandwidth(rate), fabric
    if Fraction(rate, gpus * 10**9) in rates:
        return gpus, format_bandwidth(rate // gpus), fabric
    raise ConfigError(
        "no interface has this rate, and none has its part for each GPU", "cluster.preset", repr(text), f"say how many: {usage}"
    )


def _rate(text: str, rate: str) -> BitsPerSecond:
    """A bandwidth with its unit, or with G or T for Gbit/s and Tbit/s."""
    match = re.fullmatch(r"([\d.]+)\s*(\S+)", rate.strip())
    short = {"G": "Gbit/s", "T": "Tbit/s"}
    try:
        return BitsPerSecond(parse_bandwidth(f"{match[1]} {short.get(match[2].upper(), match[2])}" if match else rate))
    except ConfigError:
        raise ConfigError("not a bandwidth", "cluster.preset", repr(text), 'for example "400G" or "400 Gbit/s"') from None


def _by_nccl(node: Node, collective: Any) -> Expansion:
    """Return NVLink, and all interfaces of a node by RDMA if it has any."""
    fields: dict[str, Any] = {}
    notes, us = [], catalogue().latency_us
    gpu = gpu_named(node.gpu, "cluster.preset")
    is_modelled = collective is None or str(collective).startswith("nccl-")
    if collective is None:
        fields["collective"] = gpu.nccl or "nccl-hopper"
        if gpu.nccl is None:
            notes.append("assumed: NCCL's constants for Hopper, because there are none for this GPU")
    if node.gpus > 1:
        is_halved = gpu.link_by == "pcie" and not node.has_p2p
        link, by = (BitsPerSecond(gpu.link // 2), "host") if is_halved else (gpu.link, gpu.link_by)
        fields["intra"] = {"bandwidth": format_bandwidth(link), "latency": f"{us[by]:g} us"}
        notes.append(f"intra: {gpu.source}; latency of NCCL's Simple ring (src/graph/tuning.cc)")
        if by != "fabric":
            fields["intra"]["framing"] = "none"
            rate = "half of PCIe's rate, through the host's memory" if by == "host" else "PCIe's whole rate"
            notes.append(f"assumed: {rate}; fleetbench doctor --network measures it")
    if node.nics:
        is_tcp = node.fabric == "ethernet"
        latency = us["tcp"] if is_tcp else node.efa_us + (0.0 if is_modelled else us["rdma"])
        framing = {"ethernet": {"framing": "tcp"}, "roce": {"framing": "roce"}, "efa": {"framing": "roce"}}.get(node.fabric or "", {})
        fields["nics_per_node"] = node.nics
        fields["inter"] = {"bandwidth": node.rate, "latency": f"{latency:g} us", **framing}
        if is_tcp:
            notes.append(f"assumed: {latency:g} us a message of TCP")
        else:
            network = "the EFA plugin (src/platform-aws.cpp)" if node.efa_us else "NCCL's InfiniBand transport (src/transport/net_ib)"
            how = "added to those of the simulated collective" if is_modelled else f"and {us['rdma']:g} us of NCCL's Simple ring"
            notes.append(f"inter: latency of {network}, {how}")
        if node.fabric == "efa":
            notes.append("assumed: EFA's headers, which are not published, are as long as RoCE's")
        if node.fabric is None:
            notes.append("assumed: InfiniBand, as the preset names no network")
    return fields, notes


def _by_gloo(node: Node) -> Expansion:
    """Return host memory, and TCP over one interface."""
    fields: dict[str, Any] = {}
    notes, latency = [], f"{catalogue().latency_us['tcp']:g} us"
    if node.gpus > 1:
        fields["intra"] = dict(catalogue().loopback)
        notes.append("assumed: inside a node gloo uses the loopback interface as measured on two cores (reports/profile)")
    if node.nics:
        fields["nics_per_node"] = 1
        fields["inter"] = {"bandwidth": node.rate, "latency": latency, **node.tcp}
        if "flow_limit" in node.tcp:
            flow = 'inside a cluster placement group, Amazon EC2 User Guide, "Instance network bandwidth"'
            notes.append(f"inter: MTU and limit of a flow {flow}")
        notes.append(f"assumed: gloo uses one interface at its full rate, {latency} a message of TCP")
        if node.fabric != "ethernet":
            notes.append('gloo sends by TCP; run.backend = "nccl" with run.device = "cuda" has the faster network')
    return fields, notes
