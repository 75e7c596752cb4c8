"""`parallel3d-plan models`: the shapes that the planner knows by name, and one of them in numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from parallel3d.models import shape_cards
from parallel3d.planner.hardware.units import rounded
from parallel3d.planner.model.flops import model_flops_per_token
from parallel3d.planner.model.named import named_shape, shape_names
from parallel3d.planner.model.shapes import (
    ModelShape,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    total_parameters,
)
from parallel3d.planner.report.json import model_tree
from parallel3d.planner.report.text import si
from parallel3d.tools.arguments import plan_parser
from parallel3d.tools.plan.shape import read_model

_EPILOG = """\
examples:
  parallel3d-plan models
  parallel3d-plan models llama3-70b
  parallel3d-plan models path/to/config.json
"""


def main(arguments: list[str]) -> int:
    parser = plan_parser(
        "models",
        takes="[MODEL] [--json]",
        does="Lists the models that --model knows by name, or counts the parameters of one.",
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="MODEL", nargs="?", help="a name, a config.json, or a recipe")
    options = parser.parse_args(arguments)
    if options.name is not None:
        shape = read_model(options.name).shape
        print(json.dumps(rounded(model_tree(shape))) if options.json else "\n".join(_show(shape)))
        return 0
    cards = shape_cards()
    shapes = [named_shape(name, cards) for name in shape_names(cards)]
    shapes.sort(key=lambda shape: (shape.name.rstrip("0123456789.bm"), total_parameters(shape)))
    print(json.dumps({"models": [model_tree(each) for each in shapes]}) if options.json else "\n".join(_list(shapes)))
    return 0


def _list(shapes: list[ModelShape]) -> Iterator[str]:
    cards = shape_cards()
    yield "name                 parameters  layers  hidden  heads  kv heads     ffn    vocab  trains"
    for shape in shapes:
        yield (
            f"{shape.name:<18}{total_parameters(shape):>17,}{shape.layers:>6}{shape.hidden:>8}{shape.heads:>7}"
            f"{shape.kv_heads:>10}{shape.ffn_hidden:>8}{shape.vocab:>9}  {'yes' if shape.name in cards else '-':>6}"
        )
    yield ""
    yield "trains: has a shape card, so that a recipe may say model.name"


def _show(shape: ModelShape) -> Iterator[str]:
    total = total_parameters(shape)
    yield f"{shape.name}: {total:,} parameters ({si(total)})"
    yield f"  embedding        {embedding_parameters(shape):>18,}" + "  (also the output table)" * shape.tied_embeddings
    yield f"  {shape.layers:>3} layers each  {layer_parameters(shape):>18,}"
    yield f"  norm and head    {head_parameters(shape, with_table=not shape.tied_embeddings):>18,}"
    yield f"layers {shape.layers}, hidden {shape.hidden}, heads {shape.heads} of {shape.head_dim},"
    norm = "LayerNorm" if shape.layer_norm else "RMSNorm"
    biases = "biases" if shape.biases else "biases on q, k, v" if shape.qkv_biases else "no biases"
    yield f"kv heads {shape.kv_heads}, ffn {shape.ffn_hidden} ({shape.feed_forward}), vocabulary {shape.vocab},"
    yield f"{shape.positions} positions, {norm}, {biases}"
    flops = model_flops_per_token(shape, 4096)
    yield f"model FLOPs of a token at sequences of 4096, forward and backward: {flops / 1e9:,.1f} G"
