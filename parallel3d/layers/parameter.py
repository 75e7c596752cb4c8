"""Base classes of all layers: parallel context, sharded parameters and their initial values.

Parameters are stored as DTensors on the tp axis, so `fully_shard` composes with them and state
dicts hold global tensors. Arithmetic uses the local tensors, because DTensor dispatch costs more
than the work of a small layer (`layers.weight_gradients`).

[Note: initial weights] Initial values do not depend on the layout. A parameter's global tensor
consists of tiles of a fixed size, or of one tile if its initializer is custom. Each tile is drawn
on the CPU in float32 from a generator seeded by (seed, global name of the parameter, position of
the tile). A rank draws only the tiles that overlap its shard. So every layout and every device
starts from the same weights, and initialization takes less time and memory the more ranks share the
model.

[Note: random starts] torch draws random numbers into each rank's shard of a DTensor. On CPUs all
ranks get the same numbers. On GPUs the numbers differ from those of one device. Here, `normal_`,
`uniform_` and `bernoulli_` of a DTensor draw the full tensor on each rank, from the given or the
default generator, and keep the local shard. Functions that compute with the drawn numbers, such as
`orthogonal_` and `trunc_normal_`, need the full tensor: `draw(parameter, nn.init.trunc_normal_)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import swap_tensors

from parallel3d.layers.collectives import outside_graph
from parallel3d.layers.regions import all_gather_to_region, copy_to_region
from parallel3d.layers.replica_check import differ, fingerprint
from parallel3d.layers.sequence import SequencePart
from parallel3d.layers.weight_gradients import (
    DelayedGradients,
    accumulate_or_return,
    as_dtensor,
    like_parameter,
    local_tensor,
)
from parallel3d.mesh import ONE_RANK, Axis
from parallel3d.shard_sizes import shard_rows
from parallel3d.torch_private import draw_dtensors_by, local_of

Initializer = Callable[[Tensor, torch.Generator | None], object]


@dataclass(frozen=True)
class Normal:
    """Initializer that draws from a normal distribution with mean 0.

    Args:
        std: Standard deviation.

    Example:
        >>> context = parallel3d.ParallelContext(tp, init=parallel3d.Normal(0.006))
        >>> layer = parallel3d.ColumnParallelLinear(64, 256, tp=context)
    """

    std: float

    def __call__(self, tensor: Tensor, generator: torch.Generator | None) -> object:
        return tensor.normal_(0.0, self.std, generator=generator)


normal = Normal


def ones(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a tensor with ones. Initializer of norm weights."""
    return tensor.fill_(1.0)


def zeros(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a tensor with zeros. Initializer of biases."""
    return tensor.zero_()


@dataclass(frozen=True)
class ParallelContext:
    """Mesh axis, device, dtype and initializers of a layer's parameters.

    Args:
        tp: Tensor-parallel axis, a one-dimensional mesh. None means one device without
            communication.
        sequence_parallel: If True, activations between layers are also split along the sequence, as
            [batch, seq / tp, hidden]. All layers of a block must agree.
        device: Device of the parameters. Default: torch's default device.
        dtype: Data type of the parameters. Default: torch's default dtype.
        init: Initializer of weight matrices.
        row_init: Initializer of row-parallel weights, which write to the residual stream. Default:
            `init`.
        cp: Context-parallel axis, over which each sequence is split (`SequencePart`). Every rank
            computes a partial sum of each parameter's gradient, which you sum over cp. None means
            full sequences.
        ep: Expert-parallel axis, over which `ParallelExperts` divides its experts. It contains the
            ranks of tp. None means tp.

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
    cp: DeviceMesh | Axis | None = None
    ep: DeviceMesh | None = None

    @cached_property
    def sequence_part(self) -> SequencePart:
        """Part of each sequence that this rank has, shared by all layers with this context."""
        return SequencePart(self.cp)


LayerTp = ParallelContext | DeviceMesh | None
# Elementwise function of a layer, which `build_engine.compile_pieces` compiles.
Pointwise = Callable[..., Tensor]
# Largest width and number of elements of a tile. Other values would change the weights that a seed
# gives.
TILE_COLUMNS = 512
TILE_NUMBERS = 2**16


def shard_tensor(full: Tensor, dim: int | None, tp: DeviceMesh | None) -> Tensor:
    """Returns a copy of this rank's shard of a global tensor, as a DTensor on the tp axis.

    The result is a plain tensor if the axis has one rank.
    """
    local = Axis.of(tp).part(full, dim).clone()
    if tp is None or tp.size() == 1:
        return local
    draw_dtensors_by(draw)  # [Note: random starts]
    return as_dtensor(local, tp, [Replicate() if dim is None else Shard(dim)], full)


@dataclass(frozen=True)
class ParameterSpec:
    """Global shape, sharded dim and initializer of a parameter.

    Args:
        shape: Shape of the global tensor.
        dim: Dim that tp shards. None replicates the parameter on every tp rank.
        init: Initializer, called as `init(tensor, generator)`.
        partial_gradient: If True, each tp rank computes a partial sum of the gradient, as norms do
            under sequence parallelism.
        uneven: If True, the last tp ranks may have fewer rows, as in a vocabulary.
        stacked: Number of matrices that are stacked along the first dim, as in a layer of experts.

    Example:
        >>> init = parallel3d.Normal(0.02)
        >>> rows = parallel3d.ParameterSpec((256, 64), 0, init)  # sharded by rows
        >>> scale = parallel3d.ParameterSpec((64,), None, init)  # replicated
    """

    shape: tuple[int, ...]
    dim: int | None
    init: Initializer
    _: KW_ONLY
    partial_gradient: bool = False
    uneven: bool = False
    stacked: int = 1

    def start(self, whole: Tensor) -> object:
        """Fills the full tensor with initial values from torch's default generator."""
        return self.init(whole, None)

    def box(self, tp: Axis, shards: Axis = ONE_RANK) -> tuple[range, range]:
        """Returns the row and column ranges of this rank's shard of the tensor as a matrix.

        Columns span all dims except the first. `shards` is the data-parallel axis that further
        splits the rows of the tp shard.
        """
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
    """Base class of modules whose parameters are DTensors on the tp axis.

    These are the layers of this library and converted modules of other libraries. State dicts
    behave as on one device. For `torch.nn.init` see [Note: random starts].
    """

    axis: Axis
    sequence_parallel: bool = False
    fused_gradients: bool = False  # See [Note: fused gradients] in `layers.weight_gradients`.
    # Collects weight gradients if the schedule splits the backward pass.
    delayed: DelayedGradients | None = None
    is_entered = False  # True if a parent module performs the communication of `enter`.
    # Attributes that `layers.linear` reads:
    is_transposed = False  # True if the weight is [in_features, out_features].
    rows: slice | None = None  # Rows of a replicated weight that this rank uses, or None for all.
    # Output width after padding with -inf, or None.
    padded_width: int | None = None

    def replicated(self, name: str) -> Any:
        """Returns a parameter's local tensor, differentiable, or None if the parameter is None.

        In the backward pass the gradient is all-reduced over tp if `sums_gradient` is True.
        """
        part = getattr(self, name)
        if isinstance(part, DTensor) and self.fused_gradients:
            part = outside_graph(_FusedLocal.apply, part)
        elif isinstance(part, DTensor):
            part = part.to_local()
        if part is None or not self.sums_gradient(name):
            return part
        return copy_to_region(part, self.axis)

    def sums_gradient(self, name: str) -> bool:
        """Returns True if each backward pass must sum the parameter's gradient over tp."""
        return False

    def enter(self, x: Tensor) -> Tensor:
        """Returns x for column-parallel layers, all-gathered if its sequence is split.

        The backward pass reduces its gradient. If `is_entered`, a parent module does both.
        """
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
    """Local tensor of a parameter, whose gradient is accumulated in place."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        local = local_tensor(parameter)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        accumulate_or_return(ctx.parameter, grad.contiguous(), fused=True)


def shard_like(full: Tensor, parameter: DTensor) -> DTensor:
    """Returns a full tensor sharded like `parameter`, without communication."""
    mesh = parameter.device_mesh
    placements = parameter.placements
    return distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def draw(parameter: Tensor, init: Callable[[Tensor], object]) -> None:
    """Fills a parameter with `init`, which receives the full tensor; each rank keeps its shard.

    All ranks of the parameter's mesh must call it with generators in the same state.

    Args:
        parameter: DTensor, or a plain tensor on one rank.
        init: Function that fills a tensor in place, for example `nn.init.orthogonal_`.

    Raises:
        ValueError: Ranks that replicate the parameter drew different numbers. Raised on all ranks.

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
    """Raises ValueError on all ranks of an axis if they have drawn different tensors."""
    if axis.size > 1 and differ(fingerprint(full).to(device_type), axis):
        raise ValueError(
            f"{name} {list(full.shape)}: differs between tp ranks, which must start from the same "
            "values; call torch.manual_seed(0) on every tp rank before you build the model"
        )


class ParallelModule(ShardedModule):
    """Base class of tensor-parallel layers.

    Args:
        tp: Tensor-parallel axis or a `ParallelContext`. None means one device without
            communication.

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
        # Skips the constructor of the torch layer that a subclass also inherits.
        nn.Module.__init__(self)
        self.context = tp if isinstance(tp, ParallelContext) else ParallelContext(tp)
        self.tp = self.context.tp
        self.sequence_parallel = self.context.sequence_parallel
        self.sequence_part = self.context.sequence_part
        self.axis = Axis.of(self.tp)
        self.specs: dict[str, ParameterSpec] = {}

    def add_parameter(self, name: str, spec: ParameterSpec | None) -> None:
        """Registers a parameter with initial values.

        The full tensor is drawn from the default generator and then sharded. Equal seeds on all
        ranks give the same global tensor for any tp. Nothing is drawn on the meta device.

        Args:
            name: Attribute name of the parameter.
            spec: Shape, sharded dim and initializer. None registers the name as None, as torch does
                for a missing bias.

        Raises:
            ValueError: tp does not divide the sharded dim (or, with `uneven`, a rank would have no
                row), or tp ranks drew different values of a replicated parameter.
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
                    f"over tp = {n}; use a multiple of {n}"
                )
        full = torch.empty(spec.shape, device=self.context.device, dtype=self.context.dtype)
        if not full.is_meta:
            draw(full, spec.start)
            if self.tp is not None and spec.dim is None and spec.init not in (ones, zeros):
                refuse_another_draw(label, full, self.axis, self.tp.device_type)
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(shard_tensor(full, spec.dim, self.tp)))

    def reset_parameters(self) -> None:
        """Draws new initial values, as `add_parameter` does.

        Resetting all layers in model order equals building the model with the same seed. A tied
        parameter keeps the values drawn by the last layer that has it, as in torch.
        """
        for name, spec in self.specs.items():
            draw(self.get_parameter(name), spec.start)

    def sums_gradient(self, name: str) -> bool:
        # Fused gradients are summed at the end of the step: [Note: fused gradients].
        return self.specs[name].partial_gradient and not self.fused_gradients


def set_fused_gradients(module: nn.Module, on: bool) -> None:
    """Switches fused gradient accumulation on or off for all sharded modules below `module`.

    With fused accumulation, a layer's backward pass adds parameter gradients directly to `.grad` or
    `main_grad`. See [Note: fused gradients] in `layers.weight_gradients`.

    Args:
        module: Model or part of a model.
        on: True to fuse.

    Example:
        >>> model = parallel3d.tensor_parallelize(model, tp)
        >>> parallel3d.set_fused_gradients(model, True)
    """
    for part in module.modules():
        if isinstance(part, ShardedModule):
            part.fused_gradients = on


def named_specs(module: nn.Module) -> Iterator[tuple[str, ParameterSpec]]:
    """Yields the global name and spec of every parameter of the parallel layers in `module`.

    A tied parameter appears under its first name only.
    """
    for name, _ in module.named_parameters():
        path, _, attribute = name.rpartition(".")
        specs = getattr(module.get_submodule(path), "specs", None)
        if isinstance(specs, dict) and attribute in specs:
            yield name, specs[attribute]


@torch.no_grad()
def initial_part(
    spec: ParameterSpec, name: str, seed: int, tp: Axis, shards: Axis = ONE_RANK
) -> Tensor:
    """Returns the initial values of this rank's shard of a parameter, in float32 on the CPU.

    The data-parallel axis `shards` further splits the rows of the tp shard. A custom initializer
    fills the full tensor, because it may depend on the shape.
    """
    rows, columns = spec.box(tp, shards)
    height, width = tile_height, tile_width = spec.shape[0], math.prod(spec.shape[1:])
    if isinstance(spec.init, Normal) or spec.init in (ones, zeros):
        tile_width = min(width, TILE_COLUMNS)
        tile_height = TILE_NUMBERS // tile_width
    part = torch.empty(len(rows), len(columns))
    for down, from_rows, to_rows in _tiles(rows, height, tile_height):
        for across, from_columns, to_columns in _tiles(columns, width, tile_width):
            place = f"/{down.start}/{across.start}" if down.start or across.start else ""
            generator = generator_of(f"{seed}/{name}{place}")
            if getattr(spec.init, "is_of_model", False):
                generator.manual_seed(seed)
            tile = torch.empty(len(down), len(across))
            is_full = tile.numel() == height * width
            spec.init(tile.view(spec.shape) if is_full else tile, generator)
            part[to_rows, to_columns] = tile[from_rows, from_columns]
    if len(spec.shape) == 1:
        return part.flatten()
    return part.unflatten(1, (-1, *spec.shape[2:]))


def generator_of(key: str) -> torch.Generator:
    """Returns a generator whose seed depends only on `key`."""
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _tiles(own: range, size: int, step: int) -> Iterator[tuple[range, slice, slice]]:
    """Yields the tiles that overlap `own` along a dim of `size` elements.

    Each item is the tile, the overlap relative to the tile, and the overlap relative to `own`.
    """
    for start in range(own.start - own.start % step, own.stop, step):
        tile = range(start, min(start + step, size))
        first = max(own.start, start)
        end = min(own.stop, tile.stop)
        yield tile, slice(first - start, end - start), slice(first - own.start, end - own.start)


def initial_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns the initial global tensor of every parameter, keyed by its first global name.

    `module` may be on the meta device. For references and tests.
    """
    return {name: initial_part(spec, name, seed, ONE_RANK) for name, spec in named_specs(module)}


def initialize(module: nn.Module, seed: int, device: torch.device | str) -> None:
    """Gives the parameters of parallel layers their initial values, without communication.

    Each rank draws its shard of one tensor at a time. Tied parameters stay tied. Call it before
    `fully_shard`.

    Args:
        module: Module on any device, including meta.
        seed: Seed of the initial values.
        device: Device of the new parameters.
    """
    for name, spec in named_specs(module):
        parameter = module.get_parameter(name)
        tp = parameter.device_mesh if isinstance(parameter, DTensor) else None
        local = initial_part(spec, name, seed, Axis.of(tp)).to(device, parameter.dtype)
        whole = like_parameter(parameter, local)
        # Unlike an assignment, a swap keeps tied parameters tied.
        swap_tensors(parameter, nn.Parameter(whole, parameter.requires_grad))
