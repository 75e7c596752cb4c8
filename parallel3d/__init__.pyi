# The public names, each with the module that `parallel3d/__init__.py` imports it from at its first
# use. Type checkers and editors read this file, too.

from parallel3d.checkpoint.own_loop import load_checkpoint as load_checkpoint
from parallel3d.checkpoint.own_loop import save_checkpoint as save_checkpoint
from parallel3d.config.load import load_recipe as load_recipe
from parallel3d.config.recipe import ModelConfig as ModelConfig
from parallel3d.config.recipe import ParallelConfig as ParallelConfig
from parallel3d.config.recipe import Recipe as Recipe
from parallel3d.convert.apply import tensor_parallelize as tensor_parallelize
from parallel3d.convert.pretrained import load_safetensors as load_safetensors
from parallel3d.convert.pretrained import parameters_on_meta as parameters_on_meta
from parallel3d.launch.from_python import train as train
from parallel3d.layers.attention import ParallelAttention as ParallelAttention
from parallel3d.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from parallel3d.layers.linear import RowParallelLinear as RowParallelLinear
from parallel3d.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from parallel3d.layers.mlp import ParallelMLP as ParallelMLP
from parallel3d.layers.norm import RMSNorm as RMSNorm
from parallel3d.layers.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
from parallel3d.mesh import build_mesh as build_mesh
from parallel3d.parallel_model import parallelize as parallelize
from parallel3d.pipeline.boundary import TensorSpec as TensorSpec
from parallel3d.pipeline.execution import Stage as Stage
from parallel3d.pipeline.runtime import PipelineRuntime as PipelineRuntime
from parallel3d.pipeline.split_model import SplitSpec as SplitSpec
from parallel3d.pipeline.split_model import split_model as split_model
from parallel3d.schedules.build import build_schedule as build_schedule
from parallel3d.schedules.schedule import Schedule as Schedule
from parallel3d.sharding.apply import shard as shard
from parallel3d.sharding.settings import Dtypes as Dtypes
from parallel3d.sharding.settings import ShardingOptions as ShardingOptions
from parallel3d.tools.plan.from_python import estimate_memory as estimate_memory
from parallel3d.tools.plan.from_python import plan as plan
from parallel3d.training.callbacks import Callback as Callback
from parallel3d.training.trainer import Trainer as Trainer

__version__: str
