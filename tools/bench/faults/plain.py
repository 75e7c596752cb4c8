"""The peer of `bench faults`: a plain torch program that sums gradients in each step, under torchrun.

python -m torch.distributed.run ... -m parallel3d.tools.bench.faults.plain METRICS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.tools.bench.faults.pace import STEP_S


def main() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 100_000):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
