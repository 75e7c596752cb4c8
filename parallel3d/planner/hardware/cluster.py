"""Devices, links and clusters, read from `tools/hardware/*.yaml` or a user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil, gcd
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from parallel3d.config.ranges import in_range
from parallel3d.config.recipe import Count, NonNegative, Positive
from parallel3d.config.schema import adapter, read
from parallel3d.config.yaml_text import load_plain, read_short, shown
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.calibration import Calibration
from parallel3d.planner.hardware.units import GIB

_LARGEST_BYTES = 4 << 20
_PRICE_KEYS = ("price_per_hour", "price_from")
Share = Annotated[float, in_range(gt=0, le=1)]
AnyLink = TypeVar("AnyLink", bound="Link")


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense peak TFLOP/s by precision. A missing precision has the bf16 peak."""

    bf16: Positive
    fp16: Positive | None = None
    fp32: Positive | None = None
    fp8: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionPeaks:
    """TFLOP/s that a fused causal kernel sustains with head dimension 128 on long sequences."""

    forward: Positive
    backward: Positive


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or CPU. Peaks are from the data sheet, efficiencies are measured (sources are
    in each file)."""

    peak_tflops: Peaks
    attention_tflops: AttentionPeaks
    memory_gib: Positive  # Memory in GiB that one process can use.
    memory_gb_per_s: Positive
    processors: Count  # Number of SMs or CUs.
    matmul_efficiency: Share  # Fraction of the peak that a large matmul sustains.
    memory_efficiency: Share  # Fraction of the bandwidth that a streaming kernel sustains.
    name: str = ""
    family: str = ""  # Architecture, for example hopper.
    cuda_names: tuple[str, ...] = ()  # Names that CUDA reports for the device.
    kernel_s: Positive = 2.0e-6  # Seconds to start and drain one kernel.
    launch_s: Positive = 6.0e-6  # Seconds of the host to launch one kernel.
    price_per_hour: Positive | None = None  # Price of one device in US dollars.
    price_from: str | None = None  # Price list and its date.

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second."""
        return self.memory_gb_per_s * 1e9

    @property
    def gpu_bytes(self) -> float | None:
        """Memory of a GPU in bytes, or None for a CPU. The chunks of the loss depend on it."""
        if self.is_cpu:
            return None
        return self.memory_bytes

    @property
    def peak_flops(self) -> dict[str, float]:
        """Peak FLOP/s, keyed by precision."""
        peaks = vars(self.peak_tflops).items()
        return {precision: 1e12 * rate for precision, rate in peaks if rate is not None}

    def peak(self, precision: str) -> float:
        peaks = self.peak_flops
        return peaks.get(precision, peaks["bf16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between ring neighbors, in one direction."""

    gb_per_s: Positive
    latency_us: NonNegative  # Latency per hop in microseconds.
    efficiency: Share

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.gb_per_s * 1e9

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6

    @property
    def sustained(self) -> float:
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class NodeLink(Link):
    gpus: Count


@dataclass(frozen=True, kw_only=True)
class Network(Link):
    """Each device's share of the network. If a group spans more than `whole_nodes` nodes, its
    bandwidth is divided by `oversubscription`."""

    oversubscription: Positive = 1.0
    whole_nodes: Count = 32


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    # Pydantic applies this to nested sections, too.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}
    device: Device
    node: NodeLink
    network: Network
    measured: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Ratios of measured to predicted values, from runs on this cluster.

    `memory` scales all bytes except parameters, gradients and optimizer states, which are counted
    exactly. `timed` and `weighed` name the frameworks of runs with a measured step time or
    memory.
    """

    arithmetic: float = 1.0
    node: float = 1.0
    network: float = 1.0
    memory: float = 1.0
    timed: tuple[str, ...] = ()
    weighed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of identical devices."""

    name: str
    device: Device
    node: NodeLink
    network: Network
    device_file: str = ""  # Name of the device's hardware file, without suffix.
    scales: Scales = Scales()  # Corrections that `with_scales` has applied.
    # Results of `parallel3d-plan calibrate`. None: not calibrated.
    measured: Calibration | None = None

    @property
    def gpus_per_node(self) -> int:
        return self.node.gpus


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one axis: how many in total and per node. `span` counts the nodes from the first
    rank to the last, including those in between."""

    size: int
    per_node: int
    span: int = 1

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def axis_group(cluster: Cluster, size: int, stride: int, *, world: int) -> Group:
    """Returns the group of `size` ranks that are `stride` apart.

    If all `world` ranks fit on one node, no group crosses its boundary. If groups do not divide a
    node, but fill a part of each node evenly, the rest is idle: groups of 32 run on 64 of the 72
    GPUs of a rack. Otherwise some groups cross a boundary, and the result is for those.
    """
    node = cluster.gpus_per_node
    if world <= node:
        return Group(size=size, per_node=size)
    span = size * stride
    per_node = min(size, node // stride)
    whole = node // span * span
    if span < node and node % span and (world % node == 0 or world % whole):
        per_node = gcd(node, span) // stride
    return Group(
        size=size,
        per_node=max(1, per_node),
        span=ceil(span / node),
    )


def load_cluster(name: str, folders: list[Path]) -> Cluster:
    """Loads a cluster from a hardware file.

    A cluster file names a device file and overrides its links key by key. The price is taken from
    the cluster file only.

    Args:
        name: Name of a file in `folders` without suffix, or a path to a .yaml file.
        folders: Folders to search. The last one takes precedence.

    Raises:
        ConfigError: The name is unknown, or the file cannot be read or is not valid.
    """
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
                f"hardware {path}: device = {shown(device)}: must be a device file, not a cluster's"
            )
        tree["device"] = {key: tree.pop(key, None) for key in _PRICE_KEYS}
        for section in ("device", "node", "network"):
            tree[section] = {**below.get(section, {}), **(tree.get(section) or {})}
    cluster = cluster_from_tree(tree, str(path))
    return replace(cluster, device_file=device_file.stem)


def cluster_of_cuda(cuda_name: str, folders: list[Path]) -> Cluster | None:
    """Returns the cluster of a device by its CUDA name, in its usual nodes, or None if no device
    file lists the name.
    """
    paths = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
    clusters = (load_cluster(str(path), folders) for path in paths)
    named = (cluster for cluster in clusters if cuda_name in cluster.device.cuda_names)
    return next((cluster for cluster in named if cluster.name == cluster.device_file), None)


def _path(name: str, folders: list[Path]) -> Path:
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name.lower() not in known:
        advice = f"choose from {', '.join(sorted(known))}"
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        if near:
            advice = f"did you mean {', '.join(near)}?"
        raise ConfigError(f"hardware {name}: unknown; {advice}")
    return known[name.lower()]


def _load(path: Path) -> dict[str, Any]:
    where = f"hardware {path}"
    try:
        text = read_short(path, "a hardware file has a few kB", _LARGEST_BYTES).decode()
        tree = load_plain(text)
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f":{problem.problem_mark.line + 1}"
        raise ConfigError(f"{where}{line}: not valid YAML: {problem.problem}") from problem
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigError(f"{where}: cannot be read ({said})") from problem
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must have the sections device, node and network")
    return {**tree}


def cluster_from_tree(tree: Mapping[str, Any], path: str) -> Cluster:
    """Builds a cluster from the tree of a hardware file.

    Args:
        tree: Sections `device`, `node` and `network`, and optionally `measured`.
        path: Path of the file, whose name without suffix is that of the cluster.

    Raises:
        ConfigError: A key is missing, unknown or out of range, or `measured` is not valid.
    """
    name = Path(path).stem
    where = f"hardware {path}: "
    keys: HardwareFile | None
    keys, errors = read(HardwareFile, tree)
    if keys is None:
        raise ConfigError(f"{where}{errors[0]} (for an example run parallel3d-plan hardware h100)")
    measured = None
    if keys.measured is not None:
        try:
            measured = adapter(Calibration).validate_python(keys.measured)
        except ValueError as problem:
            why = " ".join(str(problem).split())
            raise ConfigError(
                f"{where}measured: must be written by parallel3d-plan calibrate ({why})"
            ) from problem
    return Cluster(
        name=name,
        device=replace(keys.device, name=keys.device.name or name),
        device_file=name,
        node=keys.node,
        network=keys.network,
        measured=measured,
    )


def with_links(
    cluster: Cluster,
    *,
    network_gb_per_s: float | None,
    node_gb_per_s: float | None,
    gpus_per_node: int | None,
) -> Cluster:
    """Returns the cluster with different links or a different node size. None keeps the value."""
    node = cluster.node
    network = cluster.network
    return replace(
        cluster,
        network=replace(network, gb_per_s=network_gb_per_s or network.gb_per_s),
        node=replace(
            node,
            gb_per_s=node_gb_per_s or node.gb_per_s,
            gpus=gpus_per_node or node.gpus,
        ),
    )


def with_scales(cluster: Cluster, scales: Scales) -> Cluster:
    """Returns the cluster with its compute rates, kernel times, launch times and link speeds
    adjusted by `scales`. `scales.memory` is stored, but not applied here.
    """
    device = cluster.device
    slower = scales.arithmetic
    attention = device.attention_tflops
    device = replace(
        device,
        matmul_efficiency=device.matmul_efficiency / slower,
        memory_efficiency=device.memory_efficiency / slower,
        attention_tflops=AttentionPeaks(
            forward=attention.forward / slower, backward=attention.backward / slower
        ),
        kernel_s=device.kernel_s * slower,
        launch_s=device.launch_s * slower,
    )
    return replace(
        cluster,
        device=device,
        node=_slower(cluster.node, scales.node),
        network=_slower(cluster.network, scales.network),
        scales=scales,
    )


def _slower(link: AnyLink, scale: float) -> AnyLink:
    return replace(link, efficiency=link.efficiency / scale, latency_us=link.latency_us * scale)
