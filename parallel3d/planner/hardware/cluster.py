"""Devices, the links between them, and clusters: figures read from `tools/hardware/*.yaml` or a
user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil, gcd
from pathlib import Path
from typing import Annotated, Any

import yaml

from parallel3d.config.ranges import in_range
from parallel3d.config.recipe import Count, NonNegative, Positive
from parallel3d.config.schema import read
from parallel3d.config.yaml_text import PlainLoader, read_short, shown
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import Calibration, calibration_from_tree
from parallel3d.planner.hardware.units import GIB

_LARGEST_BYTES = 4 << 20
_PRICE_KEYS = ("price_per_hour", "price_from")
Share = Annotated[float, in_range(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class PeakKeys:
    """TFLOP/s by precision, dense."""

    bf16: Positive
    fp16: Positive | None = None
    fp32: Positive | None = None
    fp8: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionKeys:
    """TFLOP/s of a fused causal kernel with heads of 128 on long sequences."""

    forward: Positive
    backward: Positive


@dataclass(frozen=True, kw_only=True)
class DeviceKeys:
    """The section `device` of a hardware file (docs/planner.md says what each key means)."""

    peak_tflops: PeakKeys
    attention_tflops: AttentionKeys
    memory_gib: Positive
    memory_gb_per_s: Positive
    processors: Count
    matmul_efficiency: Share
    memory_efficiency: Share
    name: str | None = None
    family: str = ""
    cuda_names: tuple[str, ...] = ()
    kernel_s: Positive = 2.0e-6
    launch_s: Positive = 6.0e-6
    price_per_hour: Positive | None = None
    price_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class LinkKeys:
    """The section of a link."""

    gb_per_s: Positive
    latency_us: NonNegative
    efficiency: Share

    @property
    def link(self) -> Link:
        return Link(
            bandwidth=self.gb_per_s * 1e9,
            latency_s=self.latency_us * 1e-6,
            efficiency=self.efficiency,
        )


@dataclass(frozen=True, kw_only=True)
class NodeKeys(LinkKeys):
    gpus: Count


@dataclass(frozen=True, kw_only=True)
class NetworkKeys(LinkKeys):
    oversubscription: Positive = 1.0
    whole_nodes: Count = 32


@dataclass(frozen=True, kw_only=True)
class HardwareKeys:
    """A hardware file."""

    # for pydantic; it holds for all sections
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}
    device: DeviceKeys
    node: NodeKeys
    network: NetworkKeys
    measured: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: peaks from the vendor's data sheet, efficiencies measured (each file says
    where)."""

    name: str
    peak_flops: Mapping[str, float]  # by precision, dense, per second
    memory_bytes: float  # what a process can have
    memory_bandwidth: float  # bytes per second
    processors: int  # SMs or CUs: tiles that run at once
    matmul_efficiency: float  # share of the peak that a large matrix product sustains
    memory_efficiency: float  # share of the bandwidth that a streaming kernel sustains
    # sustained by a fused kernel: forward and backward, long sequences
    attention_flops: Mapping[str, float]
    kernel_s: float = 2.0e-6  # start and drain of one kernel
    launch_s: float = 6.0e-6  # host time to launch one
    price_per_hour: float | None = None  # US dollars
    price_from: str = ""  # whose list says so, and of which date
    family: str = ""  # the architecture; software that is older than a family runs slower on it
    cuda_names: tuple[str, ...] = ()  # the device as CUDA calls it

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    @property
    def gpu_bytes(self) -> float | None:
        """The memory of a GPU, by which a framework may choose; None for a CPU."""
        if self.is_cpu:
            return None
        return self.memory_bytes

    def peak(self, precision: str) -> float:
        return self.peak_flops.get(precision, self.peak_flops["bf16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link gives a collective between neighbours of a ring: bytes per second and direction,
    seconds per hop."""

    bandwidth: float
    latency_s: float
    efficiency: float

    @property
    def sustained(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What runs on a cluster were measured to take, over what is predicted of it: seconds of the
    devices' own work, of what ranks send each other in a node and across the network, and the bytes
    of all but parameters, gradients and optimizer states, which are counted exactly. `timed` and
    `weighed` name the framework of each run whose step, and whose memory, was measured."""

    arithmetic: float = 1.0
    node: float = 1.0
    network: float = 1.0
    memory: float = 1.0
    timed: tuple[str, ...] = ()
    weighed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. `network` is what each device has of its node's network."""

    name: str
    device: Device
    gpus_per_node: int
    node: Link
    network: Link
    oversubscription: float = 1.0  # what the network's upper tiers divide its bandwidth by
    whole_nodes: int = 32  # the most nodes whose network is not oversubscribed
    device_file: str = ""  # the name of the file that its device is from
    measured: Calibration | None = None  # by `parallel3d-plan calibrate`, on one such node
    # which its devices and links have already, and its memory has when a rank's is counted
    scales: Scales = Scales()


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one axis: how many, how many of them share a node, and from how many nodes they
    are picked."""

    size: int
    per_node: int
    span: int = 1

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def axis_group(cluster: Cluster, size: int, stride: int, *, world: int) -> Group:
    """Returns the group of `size` ranks, `stride` apart, among `world` ranks. Where a node is no
    multiple of such groups some of them lie across two nodes, and the slowest counts, unless all
    ranks are on one node."""
    node = cluster.gpus_per_node
    if world <= node:
        return Group(size=size, per_node=size)
    span = size * stride
    per_node = min(size, node // stride)
    if span < node and node % span:
        per_node = gcd(node, span) // stride
    return Group(size=size, per_node=max(1, per_node), span=ceil(span / node))


def load_cluster(name: str, folders: list[Path]) -> Cluster:
    """Reads the cluster of a hardware file: a name in `folders` (the last wins) or a path. A
    cluster's file names its device's, which it is laid over: the links key by key. Its price is its
    own, or nobody knows it: what a device costs elsewhere it does not cost there. Raises
    ConfigError with the nearest names."""
    path = _path(name, folders)
    tree = _load(path)
    device_file = path
    if isinstance(device := tree.get("device"), str):
        device_file = path.parent / device
        if device_file.suffix not in (".yaml", ".yml"):
            device_file = _path(device, [*folders, path.parent])
        below = _load(device_file)
        if isinstance(below.get("device"), str):
            raise ConfigError(
                f"hardware {path}: device = {shown(device)}: is a cluster's file; name a device's"
            )
        price = {key: tree.pop(key, None) for key in _PRICE_KEYS}
        tree = {
            **tree,
            "device": {**below.get("device", {}), **price},
            "node": {**below.get("node", {}), **(tree.get("node") or {})},
            "network": {**below.get("network", {}), **(tree.get("network") or {})},
        }
    cluster = cluster_from_tree(tree, path.stem, where=str(path))
    return replace(cluster, device_file=device_file.stem)


def cluster_of_cuda(cuda_name: str, folders: list[Path]) -> Cluster | None:
    """Returns the device that CUDA calls `cuda_name`, by its full name, in its usual nodes; None
    where no device's file of `folders` lists it."""
    paths = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
    clusters = (load_cluster(str(path), folders) for path in paths)
    named = (cluster for cluster in clusters if cuda_name in cluster.device.cuda_names)
    return next((cluster for cluster in named if cluster.name == cluster.device_file), None)


def _path(name: str, folders: list[Path]) -> Path:
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name.lower() not in known:
        advice = f"known are {', '.join(sorted(known))}"
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        if near:
            advice = f"did you mean {', '.join(near)}?"
        raise ConfigError(f"hardware {name}: unknown; {advice}")
    return known[name.lower()]


def _load(path: Path) -> dict[str, Any]:
    where = f"hardware {path}"
    try:
        text = read_short(path, "a hardware file has some kB", _LARGEST_BYTES).decode()
        tree = yaml.load(text, PlainLoader)
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f":{problem.problem_mark.line + 1}"
        raise ConfigError(f"{where}{line}: not valid YAML: {problem.problem}") from problem
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"{where}: cannot be read ({said})") from problem
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must hold the sections device, node and network")
    return tree


def cluster_from_tree(tree: Mapping[str, Any], name: str, *, where: str = "") -> Cluster:
    """Builds a cluster from the keys of a device's file. `where` is what an error calls the file.
    Raises ConfigError for the first key that is missing, unknown or out of its range."""
    where = f"hardware {where or name}: "
    keys: HardwareKeys | None
    keys, errors = read(HardwareKeys, tree)
    if keys is None:
        raise ConfigError(f"{where}{errors[0]} (parallel3d-plan hardware h100 shows a whole file)")
    try:
        measured = None
        if keys.measured is not None:
            measured = calibration_from_tree(keys.measured)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        why = f"must be as parallel3d-plan calibrate writes it ({problem})"
        raise ConfigError(f"{where}measured: {why}") from problem
    own = keys.device
    device = Device(
        name=own.name or name,
        peak_flops=_rates(own.peak_tflops),
        attention_flops=_rates(own.attention_tflops),
        memory_bytes=own.memory_gib * GIB,
        memory_bandwidth=own.memory_gb_per_s * 1e9,
        processors=own.processors,
        matmul_efficiency=own.matmul_efficiency,
        memory_efficiency=own.memory_efficiency,
        kernel_s=own.kernel_s,
        launch_s=own.launch_s,
        price_per_hour=own.price_per_hour,
        price_from=own.price_from or "",
        family=own.family,
        cuda_names=own.cuda_names,
    )
    return Cluster(
        name=name,
        device=device,
        device_file=name,
        gpus_per_node=keys.node.gpus,
        node=keys.node.link,
        network=keys.network.link,
        oversubscription=keys.network.oversubscription,
        whole_nodes=keys.network.whole_nodes,
        measured=measured,
    )


def _rates(keys: PeakKeys | AttentionKeys) -> dict[str, float]:
    """Returns operations per second by name."""
    return {name: 1e12 * rate for name, rate in vars(keys).items() if rate is not None}


def with_links(
    cluster: Cluster,
    *,
    network_gb_per_s: float | None,
    node_gb_per_s: float | None,
    gpus_per_node: int | None,
) -> Cluster:
    """Returns the same devices behind other links or in nodes of another size; None leaves what it
    stands for."""
    said = ((cluster.network, network_gb_per_s), (cluster.node, node_gb_per_s))
    network, node = (
        link if speed is None else replace(link, bandwidth=speed * 1e9) for link, speed in said
    )
    return replace(
        cluster, network=network, node=node, gpus_per_node=gpus_per_node or cluster.gpus_per_node
    )


def with_scales(cluster: Cluster, scales: Scales) -> Cluster:
    """Returns the cluster with everything that it does as much slower as the scales say: the rates
    that are sustained, the seconds that a kernel, a launch or a message takes."""
    arithmetic = scales.arithmetic
    device = replace(
        cluster.device,
        matmul_efficiency=cluster.device.matmul_efficiency / arithmetic,
        memory_efficiency=cluster.device.memory_efficiency / arithmetic,
        attention_flops={
            way: rate / arithmetic for way, rate in cluster.device.attention_flops.items()
        },
        kernel_s=cluster.device.kernel_s * arithmetic,
        launch_s=cluster.device.launch_s * arithmetic,
    )
    node, between = (
        replace(link, efficiency=link.efficiency / scale, latency_s=link.latency_s * scale)
        for link, scale in ((cluster.node, scales.node), (cluster.network, scales.network))
    )
    return replace(cluster, device=device, node=node, network=between, scales=scales)
