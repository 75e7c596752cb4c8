"""The checks, in the order in which they run. Their limits add up to less than eight minutes. No torch here."""

from __future__ import annotations

from parallel3d.tools.gpu_check.findings import Check


def _check(id: str, limit_s: float, target: str, title: str, bound: str, needs: str = "") -> Check:
    target = f"parallel3d.tools.gpu_check.{target}"
    return Check(id=id, title=title, bound=bound, limit_s=limit_s, target=target, needs=needs)


CHECKS = (
    _check("A0", 15, "start:versions_and_fork_server", "versions; the fork server", "no CUDA before the fork"),
    _check("A1", 15, "start:process_group_of_one", "process group, mesh, objects, barrier, end", "under 5 s"),
    _check("A2", 25, "training:same_losses_as_cpu", "5 steps in fp32 beside a CPU", "loss to 1e-5, norm to 1e-4"),
    _check(
        "A3",
        45,
        "training:precisions_and_optimizers",
        "precisions, optimizers, step in the backward, compile",
        "16 bits to 2e-2, optimizers to 1e-3 of a CPU, an overflow skipped, one graph for all blocks",
    ),
    _check("A4", 15, "training:dropout_and_recompute", "dropout and recompute", "the same masks and losses to the bit"),
    _check("A5", 20, "training:waits_of_a_step", "waits of the host in a step", "at most one, with any optimizer"),
    _check("A6", 25, "kernels:attention", "attention's kernels and memory at 8,192", "never the scores of S x S"),
    _check("A7", 45, "kernels:block", "a block of Llama 8B", "eager 1.15, compiled 1.05 of compiled plain torch"),
    _check(
        "A8", 20, "kernels:head_and_loss", "head and loss of 128,256 ids", "loss to 1e-4, 3 GB, 1.3 of its products"
    ),
    _check("A9", 15, "kernels:sums", "weight and embedding gradients beside float64", "as exact as float32 sums"),
    _check("A10", 20, "training:checkpoint", "a checkpoint, saved and loaded", "equal to the bit, also on a CPU"),
    _check("A11", 25, "training:memory_of_a_step", "memory of a step beside the dry run", "within 3 %"),
    _check("A12a", 15, "ranks:all_reduce", "two ranks on one GPU", "the right sum, or NCCL refuses"),
    _check("A12b", 25, "ranks:tensor_and_data", "tp 2, sequence parallel, sharded data", "losses of one rank", "A12a"),
    _check("A12c", 40, "ranks:pipelines", "pipelines of 2, 3 and 2 x 2 ranks", "losses of one rank", "A12a"),
    _check("A12d", 20, "ranks:overlap", "tp's collectives beside products", "another stream, at the same time", "A12a"),
    _check("A13", 25, "ranks:failures", "a rank raises; a rank is killed", "all end within 20 s, cause named", "A12a"),
    _check("A14", 15, "ranks:posted_receive", "products beside a posted receive", "new kernels do not block", "A12a"),
    _check(
        "A15", 50, "kernels:calibration", "parallel3d-plan calibrate --quick", "attention at 60 % of its rate or more"
    ),
)
