"""`parallel3d-launch check` on two hosts for real: it names the one that is slow, and gives the planner links by which
layouts are in the order that is then measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_hosts import TwoHosts, two_hosts

from parallel3d.config.load import load_recipe, to_yaml
from parallel3d.config.recipe import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.models import shape_cards
from parallel3d.planner.search.question import Strategy
from parallel3d.recipes.host_fit import question_of
from parallel3d.tools.plan.hardware import find_cluster

pytestmark = pytest.mark.long
_CHECK, _TIME = ("parallel3d.tools.launch", "check"), ("preflight_targets",)
# On two hosts of two ranks each, which are 0 and 1, and 2 and 3.
LAYOUTS = {
    "tp 2 inside, pp 2 across": ParallelConfig(tp=2, pp=2, microbatch_size=4),
    "tp 2 inside, dp 2 across": ParallelConfig(tp=2, dp_replicate=2, sharding="NO_SHARD", microbatch_size=4),
    "dp 4": ParallelConfig(dp_replicate=4, sharding="NO_SHARD", microbatch_size=2),
    "tp 4 across": ParallelConfig(tp=4, microbatch_size=4),
}


def write_recipe(folder: Path, parallel: ParallelConfig, name: str = "run") -> Path:
    """Writes the recipe of a model of five million parameters, and returns its path."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(f"line {number} of a text" for number in range(4000)))
    recipe = Recipe(
        model=ModelConfig(layers=4, hidden=320, heads=4, kv_heads=4, ffn_hidden=1280, vocab=258),
        train=TrainConfig(steps=6, global_batch_size=8, seq_len=32, device="cpu"),
        parallel=parallel,
        data=DataConfig(source="text", path=str(corpus)),
        logging=LoggingConfig(every=1),
        run_dir=str(folder / name),
    )
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(recipe))
    return path


def on_both(
    pair: TwoHosts, target: Sequence[str], recipe: Path, *more: str, pinned: bool = False
) -> subprocess.CompletedProcess[str]:
    """Starts torchrun with two workers on each host, with `pinned` on a core of its own, and returns how the first one
    ended and what it said."""
    started = []
    for core, host in enumerate(pair.hosts):
        own_core = ("taskset", "-c", str(core)) if pinned else ()
        where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", recipe.stem)
        agent = (*own_core, sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "2")
        here = Path(__file__).parent
        environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "OMP_NUM_THREADS": "1"}
        command = (*agent, "-m", *target, str(recipe), *more)
        started.append(host.start(*command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    (out, error), *_ = [process.communicate(timeout=240) for process in started]
    return subprocess.CompletedProcess(recipe.stem, started[0].returncode, out, error)


def checked(pair: TwoHosts, recipe: Path, *more: str, pinned: bool = False) -> dict[str, Any]:
    ended = on_both(pair, _CHECK, recipe, "--json", *more, pinned=pinned)
    assert ended.returncode == 0, ended.stderr
    tree: dict[str, Any] = json.loads(ended.stdout)
    assert tree["seconds"] < 60
    return tree


def test_over_100_mbit_per_s_and_20_ms_one_way_the_planners_order_is_the_measured_one(tmp_path: Path) -> None:
    emitted, results = tmp_path / "hardware.yaml", tmp_path / "seconds.json"
    recipes = [write_recipe(tmp_path, parallel, f"run{n}") for n, parallel in enumerate(LAYOUTS.values())]
    with two_hosts() as pair:
        pair.shape(delay_ms=20, mbit_per_s=100)
        checked(pair, recipes[0], "--emit-hardware", str(emitted))
        ended = on_both(pair, _TIME, recipes[0], *map(str, recipes[1:]), str(results))
        assert ended.returncode == 0, ended.stderr
    measured_s = dict(zip(LAYOUTS, json.loads(results.read_text()), strict=True))
    planned_s = {}
    for path, (name, parallel) in zip(recipes, LAYOUTS.items(), strict=True):
        question = replace(question_of(load_recipe(path, cards=shape_cards())), cluster=find_cluster(str(emitted)))
        planned_s[name] = Strategy(question, parallel).cost.step_time_s
    print(emitted.read_text(), file=sys.stderr)
    for name in LAYOUTS:
        print(f"{name:<26} planned {planned_s[name]:6.2f} s, measured {measured_s[name]:6.2f} s", file=sys.stderr)
    assert sorted(planned_s, key=planned_s.__getitem__) == sorted(measured_s, key=measured_s.__getitem__)


def test_a_host_whose_core_is_taken_is_named(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ParallelConfig(tp=2, dp_shard=2))
    burn = ("taskset", "-c", "1", sys.executable, "-c", "while True: pass")
    with two_hosts() as pair:
        burners = [pair.hosts[1].start(*burn) for _ in range(4)]
        found = checked(pair, recipe, pinned=True)
    assert [each.wait(timeout=10) for each in burners] == [-9] * 4
    texts = [each["text"] for each in found["findings"]]
    assert any(text.startswith("ranks 2 and 3 (host1): matrix products") for text in texts), texts


def test_a_link_that_is_slow_one_way_is_named_by_the_host_that_sends(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ParallelConfig(tp=2, dp_shard=2))
    with two_hosts() as pair:
        rate = ("rate", "10mbit", "burst", "64kb", "latency", "400ms")
        pair.hosts[1].run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate).check_returncode()
        found = checked(pair, recipe)
    slow = [each["text"] for each in found["findings"] if "host1" in each["text"] and "MB/s" in each["text"]]
    assert any(text.startswith("from host1 to host0 messages go at") for text in slow), found["findings"]
    assert not any(text.startswith("from host0") for text in slow)
