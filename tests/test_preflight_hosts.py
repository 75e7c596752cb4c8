"""`parallel3d-launch check` on two hosts for real: it names what is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_restarts import ENVIRONMENT, write_recipe
from two_hosts import two_hosts

from parallel3d.config.recipe import ParallelConfig

pytestmark = pytest.mark.long


def test_a_slow_host_and_a_link_that_is_slow_one_way_are_named(tmp_path: Path) -> None:
    """Each host has a core of its own. The second one's core also runs other programs, and what it
    sends is slow."""
    recipe = write_recipe(tmp_path, "run", ParallelConfig(tp=2, dp_shard=2))
    meeting = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host0:29500"
    check = f"-m parallel3d.tools.launch check {recipe} train.callbacks=[] --json"
    agent = f"{sys.executable} -m torch.distributed.run {meeting} {check}".split()
    limit = "tc qdisc add dev eth0 root tbf rate 10mbit burst 64kb latency 400ms"
    with two_hosts() as pair:
        pair.hosts[1].run(*limit.split()).check_returncode()
        busy = ["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
        others = [pair.hosts[1].start(*busy) for _ in range(4)]
        started = []
        for core, host in enumerate(pair.hosts):
            pipes = {
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "env": ENVIRONMENT,
            }
            started.append(host.start("taskset", "-c", str(core), *agent, **pipes))
        (out, error), *_ = [process.communicate(timeout=240) for process in started]
        for process in others:
            process.kill()
            process.wait()
    assert started[0].returncode == 0, error
    texts = [each["text"] for each in json.loads(out)["findings"]]
    assert any(text.startswith("ranks 2 and 3 (host1): matmuls") for text in texts), texts
    assert any(text.startswith("from host1 to host0 messages at") for text in texts), texts
    for text in texts:
        assert not text.startswith("from host0")
