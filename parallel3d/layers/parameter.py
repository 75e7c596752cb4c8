"""What every layer here shares: its context, and parameters that are DTensors on the tp axis,
computed with as plain tensors.

A parameter is laid over the tp axis at rest, so that `fully_shard` composes with it and a state
dict knows the global tensor; but no DTensor takes part in arithmetic, because its dispatch costs
more than a small layer's work (`layers.gradients`).

[Note: initial weights] They do not depend on the layout. Each parameter's global tensor is made of
tiles of a fixed size, and each tile is drawn on the CPU in float32 from a generator seeded by
(seed, the parameter's global name, the tile's place). A rank draws the tiles that its part lies in
and no others. So every layout, and every device, starts from the same model, and to start takes the
less time and memory, the more ranks share the model.

[Note: random starts] torch draws random numbers of a DTensor for each rank's part: on CPUs all
ranks get the same numbers, on GPUs others than one device gets. So `normal_`, `uniform_` and
`bernoulli_` of DTensors draw the full tensor from the given or the default generator on each rank,
and keep this rank's part. Functions that compute with what they drew, such as `orthogonal_` and
`trunc_normal_`, need the full tensor too: `draw(parameter, nn.init.trunc_normal_)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import swap_tensors

from parallel3d.layers.collectives import outside_graph
from parallel3d.layers.gradients import (
    DelayedGradients,
    accumulate_or_return,
    as_dtensor,
    like_parameter,
    local_tensor,
)
from parallel3d.layers.regions import all_gather_to_region, copy_to_region
from parallel3d.layers.replica_check import differ, fingerprint
from parallel3d.mesh import ONE_RANK, Axis
from parallel3d.shard_sizes import shard_rows
from parallel3d.torch_private import draw_dtensors_by, local_of

Initializer = Callable[[Tensor, torch.Generator | None], object]


@dataclass(frozen=True)
class Normal:
    """The initializer that draws from a normal distribution with mean 0.

    Example:
        >>> context = parallel3d.ParallelContext(tp, init=parallel3d.Normal(0.006))
        >>> layer = parallel3d.ColumnParallelLinear(64, 256, tp=context)
    """

    std: float

    def __call__(self, tensor: Tensor, generator: torch.Generator | None) -> object:
        return tensor.normal_(0.0, self.std, generator=generator)


normal = Normal


def ones(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a norm's scale with ones."""
    return tensor.fill_(1.0)


def zeros(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a bias with zeros."""
    return tensor.zero_()


@dataclass(frozen=True)
class ParallelContext:
    """The mesh and the memory of a layer's parameters.

    `tp` is the tensor-parallel axis, a one-dimensional mesh; None means one device and no
    communication, by the same code. `sequence_parallel` splits the activations between the layers
    along the sequence, too: all layers of a block have it, or none. `device` and `dtype` are
    torch's defaults if they are None. `init` draws the initial values of matrices; `row_init`, if
    given, those of row-parallel linears, whose output a block adds to its input.

    Example:
        >>> context = parallel3d.ParallelContext(tp, sequence_parallel=True, dtype=torch.bfloat16)
        >>> norm = parallel3d.RMSNorm(64, tp=context)
        >>> mlp = parallel3d.ParallelMLP(64, 256, tp=context)
    """

    tp: DeviceMesh | None = None
    sequence_parallel: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    init: Initializer = Normal(0.02)
    row_init: Initializer | None = None


LayerTp = ParallelContext | DeviceMesh | None
# what a layer computes without a matmul; `build_engine.compile_pieces` compiles it
Pointwise = Callable[..., Tensor]
# the most of a tile; other values make other weights of the same seed
TILE_COLUMNS = 512
TILE_NUMBERS = 2**16


def shard_tensor(full: Tensor, dim: int | None, tp: DeviceMesh | None) -> Tensor:
    """Returns a copy of this rank's part of a global tensor, as a DTensor on the tp axis, or as a
    plain tensor on one rank."""
    local = Axis.of(tp).part(full, dim).clone()
    if tp is None or tp.size() == 1:
        return local
    draw_dtensors_by(draw)  # [Note: random starts]
    return as_dtensor(local, tp, [Replicate() if dim is None else Shard(dim)], full)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's global shape, the dim that tp splits (None: every rank has it whole), and how
    it starts.

    Example:
        >>> init = parallel3d.Normal(0.02)
        >>> rows = parallel3d.ParameterSpec((256, 64), 0, init)  # tp splits the rows
        >>> scale = parallel3d.ParameterSpec((64,), None, init)  # every rank has all of it
    """

    shape: tuple[int, ...]
    dim: int | None
    init: Initializer
    _: KW_ONLY
    # each tp rank computes a summand of the gradient (norms under sequence parallelism)
    partial_gradient: bool = False
    uneven: bool = False  # the last rank may have fewer rows: a vocabulary

    def start(self, whole: Tensor) -> object:
        """Fills the whole tensor with initial values from torch's default generator."""
        return self.init(whole, None)

    def box(self, tp: Axis, shards: Axis = ONE_RANK) -> tuple[range, range]:
        """Returns the rows and columns of this tp rank's part in the global tensor as a matrix,
        whose columns are all dims but the first. Data `shards` share the rows of the part."""
        rows = range(self.shape[0])
        columns = range(math.prod(self.shape[1:]))
        if self.dim == 0:
            rows = tp.rows(self.shape[0])
        elif self.dim is not None:
            assert self.dim == 1, "a later dim is no range of columns"
            own = tp.rows(self.shape[1])
            inner = math.prod(self.shape[2:])
            columns = columns[own.start * inner : own.stop * inner]
        own = shards.rows(len(rows))
        return rows[own.start : own.stop], columns


class ShardedModule(nn.Module):
    """Base of every module whose parameters are DTensors on the tp axis: the layers of this library
    and the converted modules of others. State dicts and `torch.nn.init` give what they give on one
    device."""

    axis: Axis
    sequence_parallel: bool = False
    fused_gradients: bool = False  # [Note: fused gradients] in `layers.gradients`
    delayed: DelayedGradients | None = None  # a schedule may split the backward pass
    is_entered = False  # a module around this one does what `enter` does
    # How a linear layer differs from torch's (`layers.linear`).
    is_transposed = False  # the weight is [in_features, out_features]
    rows: slice | None = None  # what this rank uses of a weight that is whole on every rank
    padded_width: int | None = None  # of an output that is filled up with -inf

    def replicated(self, name: str) -> Any:
        """Returns this rank's part of a parameter as a plain tensor for autograd, or None.
        Backward: its gradient, summed over tp if `sums_gradient` says so."""
        part = getattr(self, name)
        if isinstance(part, DTensor) and self.fused_gradients:
            part = outside_graph(_FusedLocal.apply, part)
        elif isinstance(part, DTensor):
            part = part.to_local()
        if part is None or not self.sums_gradient(name):
            return part
        return copy_to_region(part, self.axis)

    def sums_gradient(self, name: str) -> bool:
        """Returns whether the gradient of a replicated parameter is partial and summed at once."""
        return False

    def enter(self, x: Tensor) -> Tensor:
        """Gives x to column-parallel layers, gathered if its sequence is split."""
        if self.is_entered:
            return x
        enter = all_gather_to_region if self.sequence_parallel else copy_to_region
        return enter(x, self.axis)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_full and isinstance(parameter, DTensor):
                state_dict[prefix + name] = shard_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _FusedLocal(Function):
    """This rank's part of a parameter. Backward: the gradient is added to the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        local = local_tensor(parameter)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        accumulate_or_return(ctx.parameter, grad.contiguous(), fused=True)


def shard_like(full: Tensor, parameter: DTensor) -> DTensor:
    """Returns a full tensor in the layout of `parameter`. Nothing is sent."""
    mesh = parameter.device_mesh
    placements = parameter.placements
    return distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def draw(parameter: Tensor, init: Callable[[Tensor], object]) -> None:
    """Fills a parameter by `init`, which gets the full tensor; this rank keeps its part.

    Every rank of the parameter's mesh calls it, with generators of the same state. Raises
    ValueError on all ranks if ranks that hold the same numbers have drawn different ones.

    Example:
        >>> layer = parallel3d.ColumnParallelLinear(64, 256, tp=tp)
        >>> parallel3d.draw(layer.weight, nn.init.orthogonal_)
    """
    if not isinstance(parameter, DTensor):
        init(parameter)
        return
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    init(full)
    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and not full.is_meta:
            axis = Axis(mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
            refuse_another_draw("a parameter", full, axis, mesh.device_type)
    local_of(parameter).copy_(local_of(shard_like(full, parameter)))


def refuse_another_draw(name: str, full: Tensor, axis: Axis, device_type: str) -> None:
    """Raises ValueError on all ranks of an axis if they have not drawn the same tensor."""
    if axis.size > 1 and differ(fingerprint(full).to(device_type), axis):
        raise ValueError(
            f"{name} {list(full.shape)}: was drawn differently on another tp rank, and each holds "
            "it whole; call torch.manual_seed(0) on every tp rank before the model is built"
        )


class ParallelModule(ShardedModule):
    """Base of the layers. `tp` is the tensor-parallel axis or a `ParallelContext`; None means one
    device and no communication.

    Example:
        >>> class Scale(parallel3d.ParallelModule):
        ...     def __init__(self, hidden, tp=None):
        ...         super().__init__(tp)
        ...         spec = parallel3d.ParameterSpec((hidden,), None, parallel3d.Normal(0.02))
        ...         self.add_parameter("weight", spec)
        ...
        ...     def forward(self, x):
        ...         return x * self.replicated("weight")
    """

    def __init__(self, tp: LayerTp) -> None:
        nn.Module.__init__(self)  # not that of the layer of torch's that this one is a kind of
        self.context = tp if isinstance(tp, ParallelContext) else ParallelContext(tp)
        self.tp = self.context.tp
        self.sequence_parallel = self.context.sequence_parallel
        self.axis = Axis.of(self.tp)
        self.specs: dict[str, ParameterSpec] = {}

    def add_parameter(self, name: str, spec: ParameterSpec | None) -> None:
        """Registers a parameter with its initial values, drawn whole from the default generator and
        then cut: equal seeds on all ranks give the same global tensor for any tp. On the meta
        device nothing is drawn. Without a spec the name is registered as None, as torch does for a
        bias that a layer does not have.

        Raises ValueError where tp does not divide the dim that is split, and on all tp ranks where
        a parameter that each of them holds whole was not drawn alike: their fingerprints are
        compared, 16 bytes over tp.
        """
        if spec is None:
            self.register_parameter(name, None)
            return
        n = self.axis.size
        label = f"{type(self).__name__}.{name}"
        if spec.dim is not None:
            size = spec.shape[spec.dim]
            fits = len(shard_rows(size, n - 1, n)) > 0 if spec.uneven else size % n == 0
            if not fits:
                raise ValueError(
                    f"{label} {list(spec.shape)}: dim {spec.dim} of size {size} cannot be split "
                    f"over tp = {n}; a multiple of {n} would do"
                )
        full = torch.empty(spec.shape, device=self.context.device, dtype=self.context.dtype)
        if not full.is_meta:
            draw(full, spec.start)
            if self.tp is not None and spec.dim is None and spec.init not in (ones, zeros):
                refuse_another_draw(label, full, self.axis, self.tp.device_type)
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(shard_tensor(full, spec.dim, self.tp)))

    def reset_parameters(self) -> None:
        """Draws the initial values again, as `add_parameter` has: after `to_empty`, a reset of all
        layers in the order of the model gives what building it with the same seed gives. A
        parameter that is tied is drawn by each of its layers, and the last one's draw stays, as
        with torch's own layers."""
        for name, spec in self.specs.items():
            draw(self.get_parameter(name), spec.start)

    def sums_gradient(self, name: str) -> bool:
        # Fused gradients are summed at the end of the step: [Note: fused gradients].
        return self.specs[name].partial_gradient and not self.fused_gradients


def set_fused_gradients(module: nn.Module, on: bool) -> None:
    """Sets for all layers and converted modules below `module` whether their backwards add up
    gradients: [Note: fused gradients].

    Example:
        >>> model = parallel3d.tensor_parallelize(model, tp)
        >>> parallel3d.set_fused_gradients(model, True)
    """
    for part in module.modules():
        if isinstance(part, ShardedModule):
            part.fused_gradients = on


def named_specs(module: nn.Module) -> Iterator[tuple[str, ParameterSpec]]:
    """Yields the global name and the spec of every parameter below `module`; of a tied one the
    first name alone."""
    for name, _ in module.named_parameters():
        path, _, attribute = name.rpartition(".")
        part = module.get_submodule(path)
        if isinstance(part, ParallelModule) and attribute in part.specs:
            yield name, part.specs[attribute]


@torch.no_grad()
def initial_part(
    spec: ParameterSpec, name: str, seed: int, tp: Axis, shards: Axis = ONE_RANK
) -> Tensor:
    """Returns what a rank's part of the parameter of this global name starts from, float32 on the
    CPU: its part over `tp`, and of that the rows of one of the data `shards` where they share them.
    An initializer that is not of this module may depend on the shape, and fills the whole tensor,
    which is then cut."""
    rows, columns = spec.box(tp, shards)
    height, width = tile_height, tile_width = spec.shape[0], math.prod(spec.shape[1:])
    if isinstance(spec.init, Normal) or spec.init in (ones, zeros):
        tile_width = min(width, TILE_COLUMNS)
        tile_height = TILE_NUMBERS // tile_width
    part = torch.empty(len(rows), len(columns))
    for down, from_rows, to_rows in _tiles(rows, height, tile_height):
        for across, from_columns, to_columns in _tiles(columns, width, tile_width):
            place = f"/{down.start}/{across.start}" if down.start or across.start else ""
            digest = hashlib.blake2b(f"{seed}/{name}{place}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            tile = torch.empty(len(down), len(across))
            is_full = tile.numel() == height * width
            spec.init(tile.view(spec.shape) if is_full else tile, generator)
            part[to_rows, to_columns] = tile[from_rows, from_columns]
    if len(spec.shape) == 1:
        return part.flatten()
    return part.unflatten(1, (-1, *spec.shape[2:]))


def _tiles(own: range, size: int, step: int) -> Iterator[tuple[range, slice, slice]]:
    """Yields the tiles along a dim of `size` that `own` lies in: the tile, what `own` has of it,
    and where in `own`."""
    for start in range(own.start - own.start % step, own.stop, step):
        tile = range(start, min(start + step, size))
        first = max(own.start, start)
        end = min(own.stop, tile.stop)
        yield tile, slice(first - start, end - start), slice(first - own.start, end - own.start)


def initial_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns the initial global tensor of every parameter by its (first) global name, for
    references and tests. `module` may be on the meta device."""
    return {name: initial_part(spec, name, seed, ONE_RANK) for name, spec in named_specs(module)}


def initialize(module: nn.Module, seed: int, device: torch.device | str) -> None:
    """Gives every parameter its initial values on `device`, from the meta device or another. Each
    rank draws its part of one tensor at a time. Tied parameters stay tied. Nothing is sent. Call it
    before `fully_shard`."""
    for name, spec in named_specs(module):
        parameter = module.get_parameter(name)
        tp = parameter.device_mesh if isinstance(parameter, DTensor) else None
        local = initial_part(spec, name, seed, Axis.of(tp)).to(device, parameter.dtype)
        whole = like_parameter(parameter, local)
        # A swap, unlike an assignment, keeps tied parameters tied.
        swap_tensors(parameter, nn.Parameter(whole, parameter.requires_grad))
