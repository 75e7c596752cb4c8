"""Which hardware file a name means: a device in its usual nodes, or a cluster, whose file names its device's."""

from __future__ import annotations

import math
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster, load_cluster
from parallel3d.planner.hardware.units import GIB

FOLDER = Path(__file__).parents[1] / "hardware"
_SHOWS = "parallel3d-plan hardware h100 shows usual figures"
# The common name of what has several files: the one that most clusters have.
_USUAL = {
    "a100": "a100-80gb",
    "a800": "a800-80gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "v100": "v100-32gb",
    "rtx-4090": "rtx4090",
    "4090": "rtx4090",
    "tpu": "tpu-v5p",
}


def hardware_files() -> dict[str, Path]:
    """Of devices and of clusters."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def device_files() -> dict[str, Path]:
    return {name: path for name, path in hardware_files().items() if find_cluster(name).device_file == name}


def cluster_files() -> dict[str, Path]:
    devices = device_files()
    return {name: path for name, path in hardware_files().items() if name not in devices}


def file_of(name: str) -> str:
    """The name of a file (or a path, as it is) that a person's name for a device stands for."""
    if Path(name).suffix in (".yaml", ".yml"):
        return name
    plain = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    return _USUAL.get(plain, plain)


def find_cluster(name: str) -> Cluster:
    """The cluster of a shipped name or of a file. Raises ConfigError with the nearest names."""
    found = file_of(name)
    if found == name and Path(name).suffix in (".yaml", ".yml") and not Path(name).is_file():
        raise ConfigError(f"hardware {name}: no such file; shipped are {', '.join(hardware_files())}")
    cluster = load_cluster(found, [FOLDER])
    _check(cluster, name)
    return cluster


def _check(cluster: Cluster, name: str) -> None:
    """Figures that a user's own file may have wrong, which would give nonsense and no error."""
    device, node, network = cluster.device, cluster.node, cluster.network
    figures = {  # in the file's units
        "device.memory_gib": device.memory_bytes / GIB,
        "device.memory_gb_per_s": device.memory_bandwidth / 1e9,
        "device.processors": device.processors,
        "node.gpus": cluster.gpus_per_node,
        "network.oversubscription": cluster.oversubscription,
        "network.whole_nodes": cluster.whole_nodes,
        "node.gb_per_s": node.bandwidth / 1e9,
        "network.gb_per_s": network.bandwidth / 1e9,
        **{f"device.peak_tflops.{precision}": flops / 1e12 for precision, flops in device.peak_flops.items()},
        **{f"device.attention_tflops.{way}": flops / 1e12 for way, flops in device.attention_flops.items()},
    }
    if device.price_per_hour is not None:
        figures["device.price_per_hour"] = device.price_per_hour
    latencies = {"node.latency_us": node.latency_s * 1e6, "network.latency_us": network.latency_s * 1e6}
    shares = {
        "device.matmul_efficiency": device.matmul_efficiency,
        "device.memory_efficiency": device.memory_efficiency,
        "node.efficiency": node.efficiency,
        "network.efficiency": network.efficiency,
    }
    for key, value in figures.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"hardware {name}: {key} = {value:g}: must be above 0 and finite; {_SHOWS}")
    for key, value in latencies.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"hardware {name}: {key} = {value:g}: must be at least 0 and finite; try 3")
    for key, value in shares.items():
        if not 0 < value <= 1:
            raise ConfigError(f"hardware {name}: {key} = {value:g}: must be a share above 0 and at most 1; try 0.8")
    if "bf16" not in device.peak_flops:
        raise ConfigError(f"hardware {name}: device.peak_tflops must have bf16, the precision that others fall back to")


def larger_devices(needed_bytes: float) -> list[str]:
    """Shipped devices whose memory would hold so much, the smallest first."""
    sizes = {name: find_cluster(name).device.memory_bytes for name in device_files() if name != "cpu"}
    return sorted((name for name, size in sizes.items() if size >= needed_bytes), key=lambda name: sizes[name])
