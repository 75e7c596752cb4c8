"""Local SGD and DiLoCo over dp_replicate.

Replicas train independently, and take an outer step together every `sync_every` steps and after the
last one.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): the outer gradient is the mean over
the replicas of (outer parameters - parameters of the replica). The outer optimizer is SGD with
Nesterov momentum, and all replicas continue from its result. With an outer learning rate of 1 and
no momentum this is plain averaging (local SGD; Stich 2018, arXiv 1805.09767).

A checkpoint holds these tensors, which a synchronous run can also read:

    model.<name>                 outer parameters, which export and other runs use as the model
    outer.momentum.<name>        momentum of the outer optimizer
    replica.<r>.<name>           state of replica r: a tensor named as in a synchronous run

All computations use this rank's shard of each parameter (`LocalParameter.local`), for any tp, pp
and dp_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from parallel3d.checkpoint.files import MODEL
from parallel3d.checkpoint.manifest import SavedReplicas
from parallel3d.config.recipe import Recipe
from parallel3d.diagnosis.replicas import Copies
from parallel3d.layers.collectives import all_reduce, all_to_all, gather
from parallel3d.mesh import Axis
from parallel3d.training.outer_loop import BuildOuterLoop, OuterLoop, Tensors
from parallel3d.training.step_result import StepTotals
from parallel3d.training.trainer import Trainer


def outer_loop_of(recipe: Recipe) -> BuildOuterLoop | None:
    """Returns the argument `outer_loop` of `Trainer` for a recipe, None without local SGD."""
    return None if recipe.local_sgd.sync_every is None else LocalSgd


class LocalSgd(OuterLoop):
    """Outer loop of local SGD. Collective: all ranks create it after initializing the weights."""

    def __init__(self, trainer: Trainer, replicas: Axis) -> None:
        self._config = trainer.recipe.local_sgd
        self._steps = trainer.recipe.train.steps
        self._parameters = trainer.parameters
        self._replicas = replicas
        self._publish = trainer.engine.publish
        # Outer parameters in float32, equal on all replicas. Keys are unique, so a tied weight that
        # this rank holds twice occurs once.
        self.values = {p.name: p.local.detach().float().clone() for p in trainer.parameters}
        self.momenta = {name: torch.zeros_like(value) for name, value in self.values.items()}

    def combine(self, totals: StepTotals) -> StepTotals:
        """Averages the loss over all replicas, weighted by their target tokens.

        The gradient norm becomes the root mean square of the replicas' norms. Everything else is
        summed.
        """
        loss = totals.loss * totals.tokens
        square = totals.grad_norm.square()
        own = totals._replace(loss=loss, grad_norm=square)
        summed = StepTotals(*all_reduce(torch.stack(own), self._replicas))
        loss = summed.loss / summed.tokens.clamp(min=1.0)
        norm = (summed.grad_norm / self._replicas.size).sqrt()
        return summed._replace(loss=loss, grad_norm=norm)

    def after_step(self, step: int, *, is_last: bool) -> None:
        assert self._config.sync_every is not None
        is_due = step % self._config.sync_every == 0 or step == self._steps
        if is_due != is_last:  # The second call (`is_last`) acts only if the first did not.
            self._synchronize()

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Takes the outer step by the rule of `torch.optim.SGD`."""
        config = self._config
        for name, own in {p.name: p.local for p in self._parameters}.items():
            momentum = self.momenta[name]
            gradient = mean_over(self.values[name] - own, self._replicas)
            momentum.mul_(config.outer_momentum).add_(gradient)
            step = momentum
            if config.nesterov:
                step = gradient.add_(momentum, alpha=config.outer_momentum)
            self.values[name].sub_(step, alpha=config.outer_lr)
        self._set(self.values)

    @torch.no_grad()
    def _set(self, values: Tensors) -> None:
        """Copies `values` into the parameters of this replica."""
        for parameter in self._parameters:
            parameter.local.copy_(values[parameter.name])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager in which the model computes with the outer parameters."""
        own = {p.name: p.local.detach().clone() for p in self._parameters}
        self._set(self.values)
        self._publish()
        try:
            yield
        finally:
            self._set(own)
            self._publish()

    def copies(self) -> list[Copies]:
        """Returns the outer parameters and momentum, which must be equal on all replicas."""
        tensors: Tensors = {}
        for name, value in self.values.items():
            tensors[f"outer {name}"] = value
            tensors[f"optimizer.outer.{name}"] = self.momenta[name]
        return [Copies(self._replicas, tensors)]

    def begin(self) -> None:
        for parameter in self._parameters:
            self.values[parameter.name].copy_(parameter.local.detach())

    def save(self, state: Tensors) -> tuple[Tensors, SavedReplicas]:
        own = {f"replica.{self._replicas.rank}.{name}": tensor for name, tensor in state.items()}
        saved = SavedReplicas(replicas=self._replicas.size, has_momentum=True)
        return own | self._outer_tensors(with_momentum=True), saved

    def tensors_to_load(self, state: Tensors, saved: SavedReplicas | None) -> Tensors:
        tensors = self._outer_tensors(with_momentum=saved is not None and saved.has_momentum)
        prefix = "" if saved is None else f"replica.{self._replicas.rank % saved.replicas}."
        for name, tensor in state.items():
            if self._are_same(saved) or not name.startswith(MODEL):
                tensors[prefix + name] = tensor
        return tensors

    def after_loading(self, saved: SavedReplicas | None) -> None:
        """Sets the momenta to 0 if the checkpoint has none.

        Each replica starts from the outer parameters unless the checkpoint has the same number of
        replicas.
        """
        if saved is None or not saved.has_momentum:
            for momentum in self.momenta.values():
                momentum.zero_()
        if not self._are_same(saved):
            self._set(self.values)

    def _are_same(self, saved: SavedReplicas | None) -> bool:
        return saved is not None and saved.replicas == self._replicas.size

    def _outer_tensors(self, *, with_momentum: bool) -> Tensors:
        """Returns outer parameters and momenta as DTensors, keyed by their checkpoint names."""
        tensors: Tensors = {}
        for parameter in self._parameters:
            name = parameter.name
            tensors[f"{MODEL}{name}"] = parameter.part.distributed(self.values[name])
            if with_momentum:
                tensors[f"outer.momentum.{name}"] = parameter.part.distributed(self.momenta[name])
        return tensors


def mean_over(tensor: Tensor, replicas: Axis) -> Tensor:
    """Returns the mean of a tensor over the replicas, bitwise identical on all of them.

    Each replica averages a slice and sends it to the others. A rank sends 2 (n - 1) / n of the
    tensor, like a ring all-reduce. Slices are summed in the order of the replicas.
    """
    count = replicas.size
    slices = pad(tensor.flatten(), (0, -tensor.numel() % count)).view(count, -1)
    mean = all_to_all(slices, replicas).mean(dim=0)
    return gather(mean, replicas, dim=0)[: tensor.numel()].view_as(tensor)
