"""`parallel3d-launch check` on two hosts for real: it names the one that is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_restarts import ENVIRONMENT, write_recipe
from two_hosts import TwoHosts, two_hosts

from parallel3d.config.recipe import ParallelConfig

pytestmark = pytest.mark.long


def on_both(
    pair: TwoHosts, recipe: Path, *more: str, pinned: bool = False
) -> subprocess.CompletedProcess[str]:
    """Starts torchrun with two workers on each host, with `pinned` on a core of its own, and
    returns how the first one ended and what it said."""
    started = []
    meeting = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host0:29500"
    check = ("-m", "parallel3d.tools.launch", "check", str(recipe), "train.callbacks=[]", *more)
    agent = (sys.executable, "-m", "torch.distributed.run", *meeting.split(), *check)
    for core, host in enumerate(pair.hosts):
        own_core = ("taskset", "-c", str(core)) if pinned else ()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(host.start(*own_core, *agent, env=ENVIRONMENT, **pipes))
    (out, error), *_ = [process.communicate(timeout=240) for process in started]
    return subprocess.CompletedProcess(recipe.stem, started[0].returncode, out, error)


def checked(pair: TwoHosts, recipe: Path, *more: str, pinned: bool = False) -> dict[str, Any]:
    ended = on_both(pair, recipe, "--json", *more, pinned=pinned)
    assert ended.returncode == 0, ended.stderr
    tree: dict[str, Any] = json.loads(ended.stdout)
    assert tree["seconds"] < 60
    return tree


def test_a_host_whose_core_is_taken_is_named(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    burn = ("taskset", "-c", "1", sys.executable, "-c", "while True: pass")
    with two_hosts() as pair:
        burners = [pair.hosts[1].start(*burn) for _ in range(4)]
        found = checked(pair, recipe, pinned=True)
    assert [each.wait(timeout=10) for each in burners] == [-9] * 4
    texts = [each["text"] for each in found["findings"]]
    assert any(text.startswith("ranks 2 and 3 (host1): matmuls") for text in texts), texts


def test_a_link_that_is_slow_one_way_is_named_by_the_host_that_sends(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    with two_hosts() as pair:
        rate = ("rate", "10mbit", "burst", "64kb", "latency", "400ms")
        pair.hosts[1].run(
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate
        ).check_returncode()
        found = checked(pair, recipe)
    slow = [
        each["text"]
        for each in found["findings"]
        if "host1" in each["text"] and "MB/s" in each["text"]
    ]
    assert any(text.startswith("from host1 to host0 messages go at") for text in slow), found[
        "findings"
    ]
    assert not any(text.startswith("from host0") for text in slow)
