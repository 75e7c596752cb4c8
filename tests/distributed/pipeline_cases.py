"""What the tests of the pipeline's runtime share: a model of many-tensored parts, and its run whole
and in stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.schedule import Schedule

D, IDS, BATCH = 6, 5, 2
F64 = torch.float64
BOUNDARY = (
    TensorSpec(("batch", "seq", D), F64),
    TensorSpec(("batch", "seq"), torch.int64),
    TensorSpec(("batch", "seq"), F64),
    TensorSpec((1,), F64, requires_grad=False),
)


class Part(nn.Module):
    """A stage that takes and gives four tensors: hidden states, integers, a second tensor that has
    a gradient, and one without a gradient. The first stage takes two of them, and the last one
    gives one."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.linear = nn.Linear(D, D, dtype=F64)
        self.unbiased = nn.Linear(D, D, bias=False, dtype=F64)
        self.norm = nn.LayerNorm(D, dtype=F64)
        self.table = nn.Embedding(IDS, D, dtype=F64)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.is_first:
            h, ids = tensors
            aside = h.mean(-1)
            factor = h.new_full((1,), 0.5)
        else:
            h, ids, aside, factor = tensors
        h = self.norm(self.unbiased(self.linear(h).tanh()) + h * factor) + self.table(ids)
        aside = aside + h.square().mean(-1)
        if self.is_last:
            return h.sum(-1) + aside
        return (h, ids, aside, factor)


def make_parts(stages: int, seed: int = 0) -> list[Part]:
    # torch.manual_seed writes down a stack for every kind of device
    torch.default_generator.manual_seed(seed)
    return [Part(is_first=stage == 0, is_last=stage == stages - 1) for stage in range(stages)]


def make_batch(
    microbatches: int, seq: int, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Returns inputs and labels, one entry per microbatch."""
    draw = torch.Generator().manual_seed(seed)
    shape = (BATCH, seq)
    inputs = [
        (
            torch.randn(*shape, D, dtype=F64, generator=draw),
            torch.randint(IDS, shape, generator=draw),
        )
        for _ in range(microbatches)
    ]
    return inputs, torch.randn(microbatches, *shape, dtype=F64, generator=draw)


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).square().mean()


def run_whole(
    parts: Sequence[nn.Module],
    microbatches: int,
    seq: int,
) -> float:
    """The loss of the unsplit model; gradients are left in its parameters."""
    total = 0.0
    for x, label in zip(*make_batch(microbatches, seq), strict=True):
        for part in parts:
            x = part(*x)
        loss = loss_fn(x, label)
        loss.backward()
        total += loss.item()
    return total


@dataclass
class Pipeline:
    """The stages of this rank in a runtime, beside the whole model."""

    whole: list[Part]
    own: dict[int, Part]
    runtime: PipelineRuntime

    @classmethod
    def of(cls, schedule: Schedule) -> Pipeline:
        pp = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("pp",))
        whole = make_parts(schedule.stages)
        copies = make_parts(schedule.stages)
        own = {stage: copies[stage] for stage in schedule.stages_of(get_rank())}
        return cls(
            whole,
            own,
            PipelineRuntime([*own.values()], schedule, pp, loss_fn, boundaries=BOUNDARY),
        )

    def check_step(self, seq: int) -> None:
        """Runs a step of the pipeline and of the whole model; loss and gradients must agree."""
        microbatches = self.runtime.schedule.microbatches
        expected = run_whole(self.whole, microbatches, seq)
        inputs, labels = make_batch(microbatches, seq)
        loss = self.runtime.run(
            inputs if 0 in self.own else None,
            labels if self.runtime.is_last else None,
            sizes={"batch": BATCH, "seq": seq},
        )
        assert_close(
            loss.item(),
            expected if self.runtime.is_last else 0.0,
            rtol=1e-12,
            atol=0.0,
        )
        for stage, part in self.own.items():
            for (name, ours), theirs in zip(
                part.named_parameters(), self.whole[stage].parameters(), strict=True
            ):
                assert_close(
                    ours.grad,
                    theirs.grad,
                    rtol=1e-10,
                    atol=1e-12,
                    msg=f"stage {stage}: {name}",
                )

    def check_evaluation(self, microbatches: int, seq: int) -> None:
        """Evaluates another number of microbatches than training has; no gradient may change."""
        inputs, labels = make_batch(microbatches, seq)
        before = [part.linear.weight.grad for part in self.own.values()]
        sizes = {"batch": BATCH, "seq": seq}
        loss = self.runtime.evaluate(inputs, labels, sizes=sizes)
        outputs = self.runtime.forward(inputs, sizes=sizes)
        for part, grad in zip(self.own.values(), before, strict=True):
            assert part.linear.weight.grad is grad
        if self.runtime.is_last:
            assert [tuple(y.shape) for y in outputs] == [(BATCH, seq)] * microbatches
            total = sum(loss_fn(y, label).item() for y, label in zip(outputs, labels, strict=True))
            assert_close(loss.item(), total, rtol=1e-12, atol=0.0)
        else:
            assert outputs == []
            assert loss.item() == 0.0
