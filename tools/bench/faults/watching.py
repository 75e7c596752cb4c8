"""The rows of what the signs of life of all ranks cost, as processor time of the steps that have next to nothing to
compute: the same trainer in the same processes, in turn with and without the watch of torchrun and srun, which is the
dearer one: it has a thread that looks at the stack, a thread that guards it, and the store, whose server is on rank 0.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.devices import Place, exchange_places
from parallel3d.launch.peer_watch import PeerWatch
from parallel3d.mesh import build_mesh
from parallel3d.models.llama import Llama
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.tools.bench.harness import CPU, time_in_turn
from parallel3d.tools.bench.report import Round
from parallel3d.tools.bench.step import LAYOUTS, OVERHEAD, StepSize, random_batch, recipe, timed_cases
from parallel3d.training.trainer import Trainer
from parallel3d.watch.pulse import Pulse

BAR = 1.02  # processor time, with the watch / without
_SIZE = replace(OVERHEAD, name="watching", rounds=7, steps=20)  # seconds, so that there are some beats in each round


def measure(size: StepSize, parallel: ParallelConfig, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: times steps of a trainer while the ranks watch each other, in turn with unwatched ones."""
    plan, rank, world_size = recipe(size, parallel), dist.get_rank(), dist.get_world_size()
    mesh = build_mesh(parallel, "cpu")
    trainer = Trainer(plan, mesh=mesh, device=CPU, model_class=Llama, gpu_bytes=gpu_bytes(CPU))
    batches = [random_batch(plan, rank, seed) for seed in range(steps)]
    wait, ports = datetime.timedelta(seconds=60), [0]
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=wait, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        ports = [server.port]
    dist.broadcast_object_list(ports)

    def connect() -> dist.Store:
        return dist.TCPStore("localhost", ports[0], is_master=False, timeout=wait, wait_for_workers=False)

    places = exchange_places(connect(), rank, world_size, Place.of_this_process(CPU))
    coordinates = [str(parallel.coordinates(each)) for each in range(world_size)]
    pulse = Pulse()
    watches: list[PeerWatch] = []

    def watched(at: int) -> None:
        if at == 0:
            watches.append(PeerWatch(connect, rank, places, coordinates.__getitem__, None, pulse))
        unwatched(at)
        pulse.step_done(trainer.step)
        if at == steps - 1:
            watches.pop().close()

    def unwatched(at: int) -> None:
        trainer.train_step(batches[at])

    for at in range(2):  # warms up
        unwatched(at % steps)
    found = time_in_turn(watched, unwatched, rounds=rounds, steps=steps)
    dist.barrier()  # nobody asks the store any more
    return found


WATCHING = timed_cases(
    measure,
    [_SIZE],
    [replace(layout, cpu_bars={_SIZE.name: BAR}) for layout in LAYOUTS if layout.parallel.world_size > 1],
)
