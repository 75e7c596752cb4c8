"""Embedding, head and loss over tp against plain torch, also where tp does not divide the
vocabulary; and what then stands in a checkpoint, with `fully_shard` on top."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.layers.loss import IGNORED, vocab_parallel_cross_entropy
from parallel3d.layers.parameter import (
    ParallelContext,
    ParallelModule,
    initial_weights,
    set_fused_gradients,
)
from parallel3d.layers.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    head_cross_entropy,
)
from parallel3d.mesh import Axis
from parallel3d.sharding.settings import own_rows
from tests.distributed.layer_cases import (
    BF16,
    F32,
    F64,
    assert_near,
    global_gradient,
    load,
    tp_mesh,
)

B, S, D = 2, 8, 6


class Ends(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(
        self, vocab: int, context: ParallelContext, *, tied: bool = False, multiple: int = 1
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed = VocabParallelEmbedding(vocab, D, tp=context)
        self.head = VocabParallelHead(D, vocab, tp=context)
        self.head.pad_to(multiple)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, chunked: bool, z_loss: float) -> Tensor:
        x = torch.tanh(self.embed(ids))
        if chunked:
            return head_cross_entropy(x, labels, self.head, chunk_tokens=5, z_loss=z_loss)
        logits = self.head(x)
        tp = self.head.tp
        chunk = 7 if z_loss else None
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            tp,
            vocab=self.vocab,
            chunk_tokens=chunk,
            z_loss=z_loss,
        )

    def weights(self) -> dict[str, Tensor]:
        return {
            "embed.weight": self.embed.weight.detach(),
            "head.weight": self.head.weight.detach(),
        }


def plain_losses(
    embed: Tensor,
    head: Tensor,
    ids: Tensor,
    labels: Tensor,
    z_loss: float,
) -> Tensor:
    logits = F.linear(torch.tanh(F.embedding(ids, embed)), head)
    wide = logits.to(torch.promote_types(logits.dtype, F32)).flatten(0, 1)
    losses = F.cross_entropy(wide, labels.flatten(), reduction="none")
    z = z_loss * wide.logsumexp(-1).square() * (labels.flatten() != IGNORED)
    return (losses + z).view_as(labels)


def compare(
    vocab: int,
    dtype: torch.dtype,
    sp: bool,
    fused: bool,
    tied: bool,
    chunked: bool,
    extras: bool,
    multiple: int = 1,
) -> None:
    tp = tp_mesh()
    z_loss = 1e-2 if extras else 0.0
    module = Ends(
        vocab,
        ParallelContext(tp, sp, dtype=dtype),
        tied=tied,
        multiple=multiple,
    )
    set_fused_gradients(module, fused)
    generator = torch.Generator().manual_seed(3)
    embed, head = torch.randn(2, vocab, D, generator=generator, dtype=F64).to(dtype)
    embed = embed.clone().requires_grad_()
    head = embed if tied else head.clone().requires_grad_()
    load(module, {"embed.weight": embed, "head.weight": head})
    for _ in range(2):
        ids, labels = torch.randint(0, vocab, (2, B, S), generator=generator)
        ids[0, :2] = vocab - 1
        labels[0, :3] = torch.tensor([vocab - 1, 0, IGNORED])
        weights = torch.rand(B, S, generator=generator)
        losses = plain_losses(embed, head, ids, labels, z_loss)
        ours = module(ids, labels, chunked, z_loss)
        assert_near(ours, losses, "losses")
        (losses * weights).sum().backward()
        (ours * weights).sum().backward()
    pairs: list[tuple[ParallelModule, Tensor]] = [(module.embed, embed), (module.head, head)]
    for part, reference in pairs:
        spec = part.specs["weight"]
        weight = part.get_parameter("weight")
        assert weight.shape == (vocab, D)
        assert_near(
            global_gradient(weight, spec, fused=fused),
            reference.grad,
            "gradient of a weight",
        )


def compare_all(vocab: int) -> None:
    both = (False, True)
    for dtype, sp, fused, chunked in product((F64, F32), both, both, both):
        multiple = 8 if fused == sp else 1
        extras = chunked != fused
        compare(vocab, dtype, sp, fused, sp != fused, chunked, extras, multiple=multiple)
    for chunked in both:
        compare(vocab, BF16, True, True, tied=False, chunked=chunked, extras=chunked)


def sharded_twice(vocab: int, folder: str) -> None:
    """Trains tp 2 x dp_shard 2 with an uneven vocabulary, whose rows are cut twice; saves it and
    reads it in others."""
    with pytest.raises(ValueError, match="cannot be split over tp"):
        VocabParallelEmbedding(5, D, tp=tp_mesh())  # 2, 2, 1 and none
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = Ends(vocab, ParallelContext(mesh["tp"], True), multiple=16)
    whole = initial_weights(module, 0)
    load(module, whole)
    for part in (module.embed, module.head):
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        assert isinstance(part.weight, DTensor)
        assert part.weight.shape == (vocab, D)
    generator = torch.Generator().manual_seed(4)
    ids, labels = torch.randint(0, vocab, (2, 2, B, S), generator=generator)
    own = mesh["dp"].get_local_rank()
    x = module.embed(ids[own])
    loss = vocab_parallel_cross_entropy(module.head(x), labels[own], mesh["tp"], vocab=vocab)
    loss.mean().backward()
    embed, head = (whole[f"{name}.weight"].clone().requires_grad_() for name in ("embed", "head"))
    logits = F.linear(F.embedding(ids.flatten(0, 1), embed), head)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    tp = Axis.of(mesh["tp"])
    dp = Axis.of(mesh["dp"])
    for part, reference in ((module.embed, embed), (module.head, head)):
        mine = tp.part(reference.grad, 0)
        mine = own_rows(mine, dp)
        assert_near(part.weight.grad.to_local(), mine, "this rank's part of a gradient")
    dcp.save(module.weights(), checkpoint_id=folder)
    dist.barrier()
    read = {name: torch.zeros_like(weight) for name, weight in whole.items()}  # by one device
    dcp.load(read, checkpoint_id=folder)
    for name, weight in whole.items():
        assert torch.equal(read[name], weight), f"{name} was changed by being saved"
    state = Ends(vocab, ParallelContext(tp_mesh())).weights()  # by tp 4
    dcp.load(state, checkpoint_id=folder)
    for name, weight in whole.items():
        assert torch.equal(state[name].full_tensor(), weight), f"{name} in another layout"


@pytest.mark.parametrize("size, vocab", [(1, 11), (2, 12), (4, 1005), (4, 50)])
def test_vocabulary_is_plain_torchs_whatever_tp(
    world: Callable,
    size: int,
    vocab: int,
) -> None:
    world(size).run(compare_all, vocab)


def test_uneven_vocabulary_is_cut_saved_and_read_by_any_layout(
    world: Callable, tmp_path: Path
) -> None:
    world(4).run(sharded_twice, 50, str(tmp_path))
