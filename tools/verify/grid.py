"""`python -m parallel3d.tools.verify.grid`: the memory model against dry runs of random layouts."""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

from parallel3d.config.recipe import Recipe
from parallel3d.errors import Parallel3dError
from parallel3d.launch.failure import print_error
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.text import layout_text
from parallel3d.tools.arguments import Parser, whole
from parallel3d.tools.verify.command import Verified, verify
from parallel3d.tools.verify.layouts import random_layouts, random_options

MOST_BELOW, MOST_ABOVE = 0.02, 0.05  # shares of the dry run's peak; nine in ten stay below the second


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where the model is further below a dry run than the bar, more than one layout in ten is further above,
    or a count of parameters is not the real one."""
    parser = Parser(
        prog="python -m parallel3d.tools.verify.grid",
        description="Dry runs of random layouts (Llama and GPT, up to 16,384 ranks), each against the model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layouts", type=whole, default=40, help="how many (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--options", action="store_true", help="draw precisions, optimizers, dropout and more, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args(arguments)
    draw = random_options if options.options else random_layouts
    try:
        found = [_told(*layout) for layout in draw(options.layouts, options.seed)]
    except Parallel3dError as error:
        print_error(str(error))
        return error.exit_status
    errors = sorted(each.difference for each in found)
    lowest, highest, ninth = errors[0], errors[-1], errors[max(0, len(errors) * 9 // 10 - 1)]
    exact = all(each.parameters == each.dry.parameter_count for each in found)
    is_met = lowest >= -MOST_BELOW and ninth <= MOST_ABOVE and exact
    middle = median(map(abs, errors))
    if options.json:
        tree = {
            "layouts": [_tree(each) for each in found],
            "median_abs_error_pct": 100 * middle,
            "worst_abs_error_pct": 100 * max(-lowest, highest),
            "lowest_error_pct": 100 * lowest,
            "highest_error_pct": 100 * highest,
            "nine_in_ten_below_pct": 100 * ninth,
            "parameters_exact": exact,
        }
        print(json.dumps(tree))
    else:
        print("\n".join(map(_line, found)))
        print(f"lowest {lowest:+.2%} (bar -2%), nine in ten up to {ninth:+.2%} (bar +5%), highest {highest:+.2%}")
        print(f"median {middle:.2%}; parameters exact: {exact}")
    return 0 if is_met else 1


def _told(recipe: Recipe, pipeline_rank: int) -> Verified:
    found = verify(recipe, pipeline_rank * (recipe.parallel.world_size // recipe.parallel.pp))
    print(_line(found), file=sys.stderr, flush=True)
    return found


def _line(found: Verified) -> str:
    recipe = found.recipe
    return (
        f"{found.difference:+7.2%}  {found.model.total / GIB:8.2f} {found.dry.peak.total / GIB:8.2f} GiB  "
        f"{recipe.model.name} seq_len={recipe.train.seq_len} {recipe.train.precision} {layout_text(recipe.parallel)} "
        f"x {recipe.microbatches}, rank {found.rank} of {recipe.parallel.world_size}"
    )


def _tree(found: Verified) -> dict[str, object]:
    return {
        "layout": _line(found),
        "model_gib": found.model.total / GIB,
        "dry_run_gib": found.dry.peak.total / GIB,
        "error_pct": 100 * found.difference,
    }


if __name__ == "__main__":
    sys.exit(main())
