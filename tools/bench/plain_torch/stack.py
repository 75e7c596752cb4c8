"""Training with PyTorch's native stack as its users set it up: a peer of the benchmarks.

One plain function per axis, in torchtitan's order: split the stages, `parallelize_module` over tp,
`fully_shard` over data parallelism, then `torch.distributed.pipelining` over pp. The fastest
settings are used, such as one gradient reduction and one all-gather of parameters per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.data.loader import Batch
from parallel3d.errors import ConfigError
from parallel3d.tools.bench.plain_torch.llama import (
    FLOAT32_CPU,
    PeerSettings,
    PlainLlama,
    token_loss,
)
from parallel3d.tools.check_layout.plain import adamw


def cut_stage(config: ModelConfig, stage: int, stages: int) -> PlainLlama:
    """Builds a pipeline stage on the meta device.

    Each stage has `layers // stages` layers, and the first `layers % stages` stages have one more.
    """
    with torch.device("meta"):
        model = PlainLlama(config)
    each, left_over = divmod(config.layers, stages)
    start = stage * each + min(stage, left_over)
    own = range(start, start + each + (stage < left_over))
    for index in range(config.layers):
        if index not in own:
            del model.layers[str(index)]
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


def apply_tp(model: PlainLlama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shards the matrices over `mesh` with `parallelize_module`.

    With `sequence_parallel`, hidden states between blocks are [B, S / tp, D]. Otherwise the weights
    of norms stay plain tensors, because DTensor would only slow them down.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    norm: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sequence_parallel else {}
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    ends: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
        **norm,
    }
    block: dict[str, ParallelStyle] = {
        **dict.fromkeys(("attention", "mlp"), whole),
        **{
            name: ColwiseParallel()
            for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        },
        **{name: RowwiseParallel(output_layouts=between) for name in ("attention.o", "mlp.down")},
        **{
            f"{part}_{name}": style for part in ("attention", "mlp") for name, style in norm.items()
        },
    }
    # parallelize_module warns about missing modules, and a middle stage has none of `ends`.
    ends = {name: style for name, style in ends.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, ends, src_data_rank=None)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block, src_data_rank=None)


def apply_fsdp(model: PlainLlama, mesh: DeviceMesh, *, is_bf16: bool = False) -> None:
    """Applies `fully_shard` to each block and to the model.

    For speed, parameters stay unsharded until the backward pass of the last microbatch. With
    `is_bf16`, they are all-gathered in bf16, and gradients are reduced in float32.
    """
    policy = MixedPrecisionPolicy()
    if is_bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def sync_in_last_backward(model: nn.Module, index: int, is_last: bool) -> None:
    """Makes a `fully_shard` model reduce gradients and reshard only in the last microbatch.

    Call it before each microbatch, with its index.
    """
    # Called only on changes, because each setter traverses the model.
    if isinstance(model, FSDPModule) and (index == 0 or is_last):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)


class TorchStack:
    """Training with PyTorch's native stack on one rank.

    `train_step` takes this data-parallel rank's share of a batch. `mesh` has all four axes.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: DeviceMesh,
        weights: Mapping[str, Tensor],
        settings: PeerSettings = FLOAT32_CPU,
    ) -> None:
        parallel = recipe.parallel
        precision = "bf16" if settings.is_bf16 else "fp32"
        if (
            recipe.model.tied_embeddings
            or parallel.recompute != "none"
            or recipe.train.precision != precision
        ):
            raise ConfigError(f"TorchStack: needs {precision}, untied embeddings and no recompute")
        if parallel.schedule != "1f1b" or parallel.dp_replicate > 1:
            raise ConfigError(
                "TorchStack: supports only the 1f1b schedule, and dp_shard without dp_replicate"
            )
        self.mesh = mesh
        self.grad_clip = recipe.train.grad_clip
        self.microbatches = recipe.microbatches
        stage = mesh["pp"].get_local_rank()
        self.model = cut_stage(recipe.model, stage, parallel.pp).to_empty(device=settings.device)
        # Loaded before sharding: every rank slices the same full tensors without communication.
        self.model.load(weights)
        if parallel.tp > 1:
            apply_tp(self.model, mesh["tp"], parallel.sequence_parallel)
        else:
            # With tp, the backward pass of compiled blocks fails (torch 2.13): a DTensor gets a
            # plain gradient.
            settings.compile(self.model)
        # Parameters all-gathered in bf16 need no autocast.
        self.settings = replace(settings, is_bf16=settings.is_bf16 and parallel.dp == 1)
        if parallel.dp > 1:
            apply_fsdp(self.model, mesh["dp_shard"], is_bf16=settings.is_bf16)
        self.schedule: Schedule1F1B | None = None
        if parallel.pp > 1:
            part = PipelineStage(
                self.model, stage, parallel.pp, settings.device, group=mesh.get_group("pp")
            )
            # `_loss` is already scaled, which is faster than scaling all gradients.
            self.schedule = Schedule1F1B(
                part, self.microbatches, loss_fn=self._loss, scale_grads=False
            )
        self.optimizer = adamw(self.model.parameters(), recipe.optimizer)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits, labels) / self.microbatches

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """Runs one step. Returns the global loss and the gradient norm before clipping."""
        self.optimizer.zero_grad()
        device = self.settings.device
        inputs = batch.inputs.to(device)
        labels = batch.labels.to(device)
        with loss_parallel() if self.mesh["tp"].size() > 1 else nullcontext():
            loss = sum(self._losses(inputs, labels), torch.zeros((), device=device))
        if self.mesh["dp_shard"].size() > 1:
            dist.all_reduce(loss, group=self.mesh.get_group("dp_shard"))
            loss = loss / self.mesh["dp_shard"].size()
        # The norm is computed per optimizer group, because torch cannot mix DTensors (with tp, the
        # matrices) and plain tensors.
        grads = [[p.grad for p in group["params"]] for group in self.optimizer.param_groups]
        squares = [_whole(nn.utils.get_total_norm(group, foreach=True)) ** 2 for group in grads]
        loss_and_square = torch.stack([loss, torch.stack(squares).sum()])
        if self.mesh["pp"].size() > 1:
            dist.all_reduce(loss_and_square, group=self.mesh.get_group("pp"))
        loss = loss_and_square[0]
        norm = loss_and_square[1].sqrt()
        if self.grad_clip is not None:
            for group in self.optimizer.param_groups:
                nn.utils.clip_grads_with_norm_(group["params"], self.grad_clip, norm, foreach=True)
        self.optimizer.step()
        return loss.item(), norm.item()

    def _losses(self, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
        """Runs forward and backward passes. Yields the losses if this rank has the head."""
        if self.schedule is not None:
            losses: list[Tensor] = []
            first = (inputs.flatten(0, 1),) if self.model.embed is not None else ()
            target = labels.flatten(0, 1) if self.model.head is not None else None
            with self.settings.autocast():
                self.schedule.step(*first, target=target, losses=losses, return_outputs=False)
            yield from (_whole(loss.detach()) for loss in losses)
            return
        for index in range(self.microbatches):
            sync_in_last_backward(self.model, index, index == self.microbatches - 1)
            with self.settings.autocast():
                loss = self._loss(self.model(inputs[index]), labels[index])
            loss.backward()
            yield _whole(loss.detach())


def _whole(number: Tensor) -> Tensor:
    if isinstance(number, DTensor):
        return number.full_tensor()
    return number
