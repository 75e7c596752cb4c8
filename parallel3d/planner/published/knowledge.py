"""What the planner knows of frameworks and devices when it reads a published case: all of it, or
what is left when that which was set while some runs were looked at is taken back (seen.yaml,
frameworks.yaml)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel3d.planner.hardware.cluster import Cluster, load_cluster
from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.published.fields import meaning, read_table
from parallel3d.planner.published.frameworks import RunTraits, framework_of, named_framework

_GB = re.compile(r"(\d+)gb")


@dataclass
class Knowledge:
    """Programs and devices as they are known without the runs of the sources `left_out`.
    `framework`: the framework of every case, whatever it names."""

    folders: list[Path]
    left_out: frozenset[str] = frozenset()
    framework: str | None = None
    # the clusters read before, by hardware.gpu
    clusters: dict[str, Cluster] = field(default_factory=dict)

    def profile(self, framework: str, traits: RunTraits) -> FrameworkProfile:
        if self.framework is None:
            known = framework_of(framework, traits, left_out=self.left_out)
        elif self.framework.startswith("unknown"):
            known = framework_of(self.framework, traits)
        else:
            known = named_framework(self.framework)
        return replace(known, **_unseen(read_table("seen.yaml")["frameworks"], self.left_out))

    def cluster(self, gpu: str) -> Cluster:
        """Returns the nodes of a device, by the words that a case says. Raises ValueError where no
        file is of it."""
        if gpu not in self.clusters:
            files = [path.stem for folder in self.folders for path in folder.glob("*.yaml")]
            cluster = load_cluster(_device_name(gpu, files), self.folders)
            figures = read_table("seen.yaml")["devices"].get(cluster.device_file, {})
            changes = _unseen(figures, self.left_out)
            said = _GB.search(gpu.lower())
            if said:
                bytes_ = 0.99 * float(said[1]) * GIB
                if abs(bytes_ / cluster.device.memory_bytes - 1) > 0.05:
                    changes["memory_bytes"] = bytes_
            self.clusters[gpu] = replace(cluster, device=replace(cluster.device, **changes))
        return self.clusters[gpu]


def _unseen(figures: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """Returns the figures that one of the sources was looked at for, as they are without it."""
    return {
        name: figure["unseen"]
        for name, figure in figures.items()
        if not left_out.isdisjoint(figure["seen"])
    }


def _device_name(gpu: str, files: list[str]) -> str:
    """Returns the hardware file that a case means: the one of this name, whole or without its
    memory, or an alias. Raises ValueError where there is none."""
    words = [word for word in re.findall(r"[a-z0-9.]+", gpu.lower()) if not meaning("filler", word)]
    bare = [word for word in words if not _GB.fullmatch(word)]
    for name in (gpu.lower(), "-".join(words), "-".join(bare), "".join(bare)):
        if name in files:
            return name
    aliases: dict[str, str] = read_table("devices.yaml")
    suited = [alias for alias in aliases if {*alias.split()} <= {*words}]
    if not suited:
        told = f"--hardware FOLDER with {gpu.lower()}.yaml would tell"
        raise ValueError(f"hardware.gpu = {gpu.lower()}: no hardware file; {told}")
    return aliases[max(suited, key=lambda alias: len(alias.split()))]
