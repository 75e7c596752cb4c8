"""A0 and A1: what this machine has, the fork server, and a process group of one rank."""

from __future__ import annotations

import multiprocessing
import platform
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.mesh import build_mesh
from parallel3d.recipes import pretrain
from parallel3d.tools.gpu_check.findings import Findings
from parallel3d.tools.gpu_check.jobs import small


def versions_and_fork_server(findings: Findings) -> None:
    """A0: notes the versions, and forks a worker as `parallel3d-train` does. Its server must not have touched CUDA,
    which no process that is forked later could then use."""
    findings.note("torch", torch.__version__)
    findings.note("python", platform.python_version())
    if findings.on_gpu:
        gpu = torch.cuda.get_device_properties(0)
        findings.note("gpu", f"{torch.cuda.device_count()} x {gpu.name}")
        findings.note("memory, GiB", gpu.total_memory / 2**30)
        findings.note("CUDA", str(torch.version.cuda))
        findings.note("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        findings.note("cuDNN", str(torch.backends.cudnn.version()))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*pretrain._PRELOAD, __name__])
    near, far = context.Pipe(duplex=False)
    start = time.perf_counter()
    process = context.Process(target=_forked, args=(far, findings.device))
    process.start()
    far.close()
    was_touched, total = near.recv()
    process.join()
    findings.note("first worker, s", time.perf_counter() - start)
    findings.holds("CUDA is untouched when a worker starts", not was_touched)
    findings.holds("a worker computes on the device", total == 8.0)


def _forked(end: Connection, device: str) -> None:
    was_touched = torch.cuda.is_initialized()
    end.send((was_touched, float(torch.ones(8, device=device).sum())))


def process_group_of_one(findings: Findings) -> None:
    """A1: opens a process group and a mesh of one rank, sends objects and tensors through it, and closes it."""
    torch.ones(1, device=findings.device)  # the device's own start is not the group's
    with tempfile.TemporaryDirectory() as folder:
        place = Rendezvous(
            rank=0, local_rank=0, world_size=1, local_world_size=1, init_method=f"file://{folder}/rendezvous"
        )
        start = time.perf_counter()
        recipe = small(device=findings.device, start_timeout_s=60.0)
        with process_group(replace(recipe, run_dir=folder), place) as device:
            findings.note("backend", dist.get_backend())
            mesh = build_mesh(ParallelConfig(), device.type)
            sent = [{"a": 1}]
            gathered: list[object] = [None]
            all_of_them: list[object] = [None]
            dist.broadcast_object_list(sent, src=0)
            dist.gather_object(sent[0], gathered, dst=0)
            dist.all_gather_object(all_of_them, sent[0])
            x = torch.ones(4, device=device)
            dist.all_reduce(x, group=mesh.get_group("tp"))
            dist.barrier()
            findings.holds("objects arrive", gathered == all_of_them == [{"a": 1}])
            findings.holds("a sum over one rank changes nothing", float(x.sum()) == 4.0)
        findings.at_most("open to close, s", time.perf_counter() - start, 5.0)
