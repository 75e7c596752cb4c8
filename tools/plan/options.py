"""The options that say what is to be trained on what, shared by the plan commands. Imports next to nothing, so that
--help and a mistyped option answer at once."""

from __future__ import annotations

import argparse

from parallel3d.schedules.registry import SCHEDULES
from parallel3d.tools.arguments import Parser, whole
from parallel3d.tools.plan.units import bytes_per_s, dollars, fraction, memory_bytes, share

PRECISIONS = ("bf16", "fp16", "fp32")


def add_options(parser: Parser, *, gpus: bool = True) -> None:
    """The model, the hardware and the batch."""
    add_model_options(parser)
    where = parser.add_argument_group("the hardware")
    where.add_argument("--gpu", metavar="NAME", help="a device, such as h100: see parallel3d-plan hardware")
    where.add_argument(
        "--hardware", "--cluster", metavar="FILE", help="your own file or a cluster's name, in the place of --gpu"
    )
    if gpus:
        where.add_argument("--gpus", metavar="N", type=whole, help="how many (a recipe's own number by default)")
    where.add_argument("--gpus-per-node", metavar="N", type=whole, help="devices that share the fast links")
    where.add_argument("--node-gb-per-s", metavar="X", type=bytes_per_s, help="of a device's links within the node")
    where.add_argument("--network-gb-per-s", metavar="X", type=bytes_per_s, help="a device's share: 50 or 400Gbps")
    where.add_argument("--gpu-memory", metavar="X", type=memory_bytes, help="that a process can have: 80GB, 75GiB")
    where.add_argument("--mem-fraction", metavar="X", type=fraction, default=0.95, help="of it to use (0.95)")
    where.add_argument(
        "--fragmentation", metavar="X", type=share, help="of what comes and goes, that the allocator has beside (0.04)"
    )
    where.add_argument("--context-memory", metavar="X", type=memory_bytes, help="of CUDA, cuBLAS and NCCL (1.2GB)")
    where.add_argument("--price", metavar="X", type=dollars, help="US dollars for a GPU-hour")
    batch = parser.add_argument_group("the batch")
    batch.add_argument("--seq-len", metavar="N", type=whole, help="tokens of a sequence")
    batch.add_argument("--global-batch", metavar="N", type=whole, help="sequences of a step, over all devices")
    batch.add_argument(
        "--engine",
        metavar="X",
        default="parallel3d",
        help="plan for another program, such as megatron-2021 or torchtitan",
    )
    batch.add_argument("--precision", choices=PRECISIONS, help="of the arithmetic (bf16, or the recipe's)")


def add_constraints(group: argparse._ArgumentGroup) -> None:
    """What the user has decided of the layout."""
    group.add_argument("--fix", metavar="KEY=VALUE", nargs="+", default=[], help="a recipe's parallel keys: tp=8 pp=4")
    group.add_argument("--max-tp", metavar="N", type=whole)
    group.add_argument("--max-pp", metavar="N", type=whole)
    group.add_argument("--schedule", choices=tuple(SCHEDULES), metavar="S", help=f"one of {', '.join(SCHEDULES)}")


def add_model_options(parser: Parser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument("--model", metavar="X", help="a name, such as llama3-8b, a config.json, or a recipe (.yaml)")
    group.add_argument("--layers", metavar="N", type=whole, help="or by hand, with the next three")
    group.add_argument("--hidden", metavar="N", type=whole)
    group.add_argument("--heads", metavar="N", type=whole)
    group.add_argument("--vocab", metavar="N", type=whole)
    group.add_argument("--kv-heads", metavar="N", type=whole, help="(as many as heads)")
    group.add_argument("--ffn-hidden", metavar="N", type=whole, help="(8/3 of hidden; 4 times for gpt)")
    group.add_argument("--kind", choices=("llama", "gpt"), help="of the numbers by hand (llama)")
