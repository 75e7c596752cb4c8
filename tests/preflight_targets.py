"""A worker that times the steps of several recipes, one after the other, in one world that torchrun has started.

torchrun ... -m preflight_targets RECIPE... RESULTS

Rank 0 writes the seconds of a step of each recipe into RESULTS, as a list in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parallel3d.config.load import load_recipe
from parallel3d.launch.attempt import join_attempt
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.models import shape_cards
from parallel3d.tools.calibrate.probes import time_probes


def main(*arguments: str) -> None:
    *paths, results = map(Path, arguments)
    recipes = [load_recipe(path, cards=shape_cards()) for path in paths]
    rendezvous = Rendezvous.from_environment()
    assert rendezvous is not None
    with process_group(recipes[0], join_attempt(rendezvous, 60.0)) as device:
        seconds = time_probes(recipes, device, rounds=2)
    if rendezvous.rank == 0:
        results.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
