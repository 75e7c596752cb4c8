"""Dry run: one rank of a recipe trains a step on fake tensors, which have a shape but no memory.

The process group has the full size but sends nothing. The model, sharding, pipeline runtime,
transport and optimizer are those of the trainer. The dry run needs neither a GPU nor much memory.

Code that reads the value of a tensor, such as the check for a finite loss, gets 1 or True. Experts
receive equal numbers of rows (`even_route`). Unless
the recipe is for CPUs, RMSNorm saves the same tensors as the fused GPU kernel (`fused_rms_norm`),
and attention uses the kernel that an H100 would use.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel3d.config.attention_kernels import AttentionDevice, kernel_of_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.config.sharding_strategies import usual_bucket_mib
from parallel3d.data.loader import Batch
from parallel3d.layers import experts, fused_attention
from parallel3d.layers.dispatch import Route
from parallel3d.layers.positions import PackedDocuments
from parallel3d.mesh import Axis, build_mesh
from parallel3d.models import model_class
from parallel3d.pipeline.transport import Transport
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.schedules.schedule import Action, Kind
from parallel3d.timeline.recorder import Recorder
from parallel3d.tools.verify.fakes import (
    READ_A_VALUE,
    READ_THE_DEVICE,
    FakeTensor,
    FakeTensorMode,
    FSDPParam,
    cutting_by,
    world_of_none,
)
from parallel3d.tools.verify.ledger import Ledger, Made, Snapshot
from parallel3d.torch_private import local_of, tree_iter
from parallel3d.training.trainer import Trainer

# An H100, for selecting the attention kernel.
_GPU = AttentionDevice("cuda", capability=(9, 0), torch=fused_attention.TORCH_VERSION)


@dataclass(frozen=True)
class DryRun:
    """Peak memory of one rank. `at` says during or after which action it occurs."""

    peak: Snapshot
    at: str
    parameter_count: int  # Number of elements that this rank's optimizer updates.
    microbatches: int  # Number of microbatches in the dry run. More would only repeat the schedule.
    seconds: float


class _Clock(Recorder):
    """Recorder that reports actions to the ledger. The runtime calls `now` before and after each
    action, and then `add`.
    """

    def __init__(self, ledger: Ledger, actions: tuple[Action, ...]) -> None:
        self._ledger = ledger
        self._actions = iter(actions)
        self._is_in_action = False

    def now(self) -> float:
        if not self._is_in_action:
            self._is_in_action = True
            self._ledger.begin(
                "forward" if next(self._actions).kind is Kind.FORWARD else "backward"
            )
        return 0.0

    def add(self, action: Action, start: object, end: object) -> None:
        self._is_in_action = False
        self._ledger.begin("between")


class ShapesOnly(FakeTensorMode):
    """FakeTensorMode with two changes: operators whose tensors are all real, such as the ranks of a
    mesh, are executed, and reading the value of a fake tensor returns 1 or True.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_THE_DEVICE:
            return args[0].fake_device
        # torch.tensor(1.0) dispatches lift_fresh on a real tensor. Its result must become a fake
        # tensor.
        if FakeTensor not in types and func is not torch.ops.aten.lift_fresh.default:
            tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            if tensors and all(type(tensor) is Tensor for tensor in tensors):
                return func(*args, **(kwargs or {}))
        if func is READ_A_VALUE:
            return args[0].dtype.is_floating_point and 1.0 or (args[0].dtype is torch.bool or 1)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # References in the memo of converted tensors would keep `to_empty` from replacing
        # parameters.
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return result


@dataclass(frozen=True)
class Chunks:
    """Shards of a tensor, created on demand.

    `fully_shard` needs only two of them. With 16,384 ranks, creating all shards of all parameters
    would take a quarter of an hour.
    """

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, rank: int) -> Tensor:
        """Returns the shard of a data-parallel rank: `ceil(rows / num_chunks)` rows of dimension
        `dim`, fewer or none at the end.
        """
        rows = self.tensor.size(self.dim)
        each = -(-rows // self.num_chunks)
        begin = rank * each
        if begin >= max(rows, 1):
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(each, rows - begin))


def fused_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor, eps: float | None = None
) -> Tensor:
    """Stands in for torch's fused RMSNorm kernel, but computes nothing. The kernel saves its input
    and one number per token, while the CPU operators save several copies in float32.
    """
    y: Tensor = _FusedRMSNorm.apply(x, weight)
    return y


class _FusedRMSNorm(Function):
    """Allocates and saves the same tensors as the fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(
            x, weight, torch.empty((*x.shape[:-1], 1), dtype=wide, device=x.device)
        )
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Sizes(list[int]):
    """Numbers of rows that the host knows, in place of a tensor."""

    def tolist(self) -> list[int]:
        return self


def even_route(chosen: Tensor, count: int, axis: Axis, *, is_grouped: bool) -> Route:
    """Stands in for `dispatch.route`, but divides the rows evenly over ranks and experts."""

    def even(parts: int) -> _Sizes:
        ends = [chosen.numel() * part // parts for part in range(parts + 1)]
        return _Sizes(end - begin for begin, end in pairwise(ends))

    own = count // axis.size
    counts: Any = chosen.new_empty(own) if is_grouped else even(own)
    order = torch.empty_like(chosen.flatten())
    if axis.size == 1:
        return Route(order, counts, None, [], [])
    sizes = even(axis.size)
    return Route(order, counts, torch.empty_like(order), sizes, sizes)


def dry_run(recipe: Recipe, rank: int, *, gpu_bytes: float | None) -> DryRun:
    """Trains one step on `rank`, with optimizer states already allocated, and returns its peak
    memory. `gpu_bytes` is the memory of a GPU, or None for CPUs.
    """
    start = time.perf_counter()
    recipe = shortened(recipe)
    bucket_mib = recipe.parallel.bucket_mib or usual_bucket_mib(on_gpu=gpu_bytes is not None)
    recipe = replace(recipe, parallel=replace(recipe.parallel, bucket_mib=bucket_mib))
    receive = Transport.receive

    def kept_from_now_on(transport: Transport, taker: Action) -> tuple[Tensor, ...]:
        """Counts tensors received for a forward pass as saved activations."""
        tensors = receive(transport, taker)
        ledger.mark(tensors, "forward" if taker.kind is Kind.FORWARD else "between")
        return tensors

    def to_host(parameter: FSDPParam, gradient: Tensor) -> DTensor:
        """Simulates the copy of a reduced gradient to the host, which torch omits on CPUs."""
        with ledger.on_host():
            return shared(parameter, gradient.clone())

    shared = FSDPParam.to_sharded_dtensor
    with world_of_none(recipe.parallel.world_size, rank), ExitStack() as modes:
        mesh = build_mesh(recipe.parallel, "cpu")
        modes.enter_context(ShapesOnly())
        ledger = modes.enter_context(Ledger())
        modes.enter_context(cutting_by(Chunks))
        modes.enter_context(mock.patch.object(Transport, "receive", kept_from_now_on))
        if gpu_bytes is not None:
            # A patch, not a TorchFunctionMode, because modes are disabled during recomputation.
            modes.enter_context(mock.patch.object(F, "rms_norm", fused_rms_norm))
            modes.enter_context(
                mock.patch.object(fused_attention, "device_of", lambda device: _GPU)
            )
            if kernel_of_recipe(recipe, _GPU).name == "math":
                modes.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recipe.model.architecture == "transformers":
            # Fake tensors look like tracing, in which every model would build a causal mask.
            modes.enter_context(
                mock.patch("transformers.masking_utils.is_tracing", return_value=False)
            )
        if recipe.model.experts is not None:
            is_grouped = gpu_bytes is not None and recipe.train.precision.startswith("bf16")
            modes.enter_context(
                mock.patch.object(experts, "route", partial(even_route, is_grouped=is_grouped))
            )
            modes.enter_context(mock.patch.object(experts, "uses_grouped", lambda x: is_grouped))
        trainer, batch = build_dry(recipe, mesh, torch.device("cpu"), gpu_bytes)
        actions = trainer.pipeline.schedule.ranks[trainer.pipeline.links.rank]
        # Run a forward pass, because storages of unsharded parameters are allocated only once.
        trainer.logits(batch.inputs[:1], batch.documents and batch.documents[:1])
        for parameter in trainer.parameters:
            parameter.part.sync_views()
        locals_ = [parameter.local for parameter in trainer.parameters]
        own = (each for stage in trainer.stages for each in stage.module.parameters())
        at_rest: tuple[Made, Made] = ("parameters", "optimizer")
        if recipe.parallel.offload and gpu_bytes is not None:
            at_rest = ("host", "host")
            modes.enter_context(mock.patch.object(FSDPParam, "to_sharded_dtensor", to_host))
        ledger.mark(
            (local_of(each) if isinstance(each, DTensor) else each for each in own), at_rest[0]
        )
        ledger.mark(locals_, at_rest[0])
        states = (value for state in trainer.optimizer.state.values() for value in state.values())
        ledger.mark((value for value in states if isinstance(value, FakeTensor)), at_rest[1])
        trainer.engine.publish()  # As after the optimizer step of a previous step.
        gc.collect()  # Free reference cycles of the forward pass above.
        ledger.forget_peak()
        trainer.train_step(batch, _Clock(ledger, actions))
        return DryRun(
            peak=ledger.peak,
            at=_place(ledger.peak, actions),
            parameter_count=sum(local.numel() for local in locals_),
            microbatches=recipe.microbatches,
            seconds=time.perf_counter() - start,
        )


def build_dry(
    recipe: Recipe, mesh: DeviceMesh, device: torch.device, gpu_bytes: float | None
) -> tuple[Trainer, Batch]:
    """Builds the trainer of this rank and a batch for it, without other processes.

    Call it within `ShapesOnly`. The trainer's tensors are fake tensors on `device`. `gpu_bytes` is
    the memory of a GPU, or None for CPUs.
    """
    trainer = Trainer(
        recipe,
        mesh=mesh,
        device=device,
        model_class=model_class(recipe.model.architecture),
        initialize=False,
        gpu_bytes=gpu_bytes,
    )
    shape = (recipe.microbatches, recipe.parallel.microbatch_size, recipe.train.seq_len)
    ids = torch.zeros(shape, dtype=torch.int64)
    samples = torch.zeros(shape[:2], dtype=torch.int64)
    documents = None
    # Fake token IDs have no document borders, so assume two documents per sequence.
    if recipe.data.documents == "mask":
        lengths = (shape[2] // 2, shape[2] - shape[2] // 2) * shape[1]
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        documents = [PackedDocuments(lengths, starts, ids[0])] * shape[0]
    return trainer, Batch(
        inputs=ids, labels=torch.zeros_like(ids), samples=samples, documents=documents
    )


def _place(peak: Snapshot, actions: tuple[Action, ...]) -> str:
    """Describes when the peak occurs. `peak.action` is odd during an action and even after one."""
    number, between = divmod(peak.action - 1, 2)
    if not between:
        return f"action {number + 1} of {len(actions)}, {actions[number]}"
    if number + 1 < len(actions):
        return f"after {actions[number]}"
    return "after the last action: gradients or optimizer"


def shortened(recipe: Recipe) -> Recipe:
    """Returns the recipe with fewer microbatches, if every rank's peak memory stays the same."""
    parallel = recipe.parallel
    pp = parallel.pp
    if SCHEDULES[parallel.schedule].holds_whole_batch:
        return recipe

    def peaks(microbatches: int) -> tuple[int, ...]:
        schedule = build_schedule(
            parallel.schedule,
            pp=pp,
            microbatches=microbatches,
            virtual_stages=parallel.virtual_stages,
        )
        return schedule.peak_live_microbatches

    # Try pp + 2, and multiples of pp, which interleaved schedules need. All accumulate gradients.
    few = [count for count in (pp + 2, 2 * pp, 3 * pp, 4 * pp) if count < recipe.microbatches]
    whole = peaks(recipe.microbatches)
    count = next((count for count in few if peaks(count) == whole), recipe.microbatches)
    train = replace(recipe.train, global_batch_size=count * parallel.dp * parallel.microbatch_size)
    return replace(recipe, train=train)
