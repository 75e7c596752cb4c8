"""The planner's prediction for a run."""

from __future__ import annotations

from math import nan
from pathlib import Path

from parallel3d.errors import Parallel3dError
from parallel3d.planner.hardware.cluster import Cluster, cluster_of_cuda
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.report.charts import Tree, shortened


def add_prediction(run: Tree, cluster: Cluster | None) -> None:
    """Adds to the tree of a run: predicted figures by their names in a run, and a note.

    Without a cluster, it is that of the run's GPU, if run.json names one that has a hardware file.
    """
    run["predicted"], run["note"] = {}, "no prediction: give the hardware, such as --gpu h100"
    for key in run["starts"][-1]["facts"] if run["starts"] else ():
        if cluster is None and key.startswith("devices."):
            cluster = cluster_of_cuda(key.removeprefix("devices."), [HARDWARE])
    if cluster is None:
        return
    from parallel3d.tools.plan.accuracy import how_sure
    from parallel3d.tools.plan.compare import compare  # Imports the planner's search.

    try:
        found = compare(Path(run["folder"]), cluster)
    except Parallel3dError as error:
        run["note"] = f"no prediction: {error}"
        return
    figures = {key: predicted for key, (predicted, _) in found.figures.items()}
    figures["peak_memory_bytes"] = figures.pop("peak_allocated_gib", nan) * 2**30
    figures |= vars(found.cost.parts)
    figures["other"] = figures.pop("overhead")
    run["predicted"] = shortened(figures)
    notes = [f"predicted for {cluster.device.name}"]
    if found.other_device:
        notes.append(f"the run was on another device: {found.other_device}")
    notes.append(how_sure(found.run))
    run["note"] = "; ".join(notes)
