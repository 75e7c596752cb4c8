"""Time by cause of real runs: its sum in eight layouts, sleeps planted in each kind of work, and
the CPU time that measuring takes.

`python -m tests.time_causes` ends with 1 if the causes of a layout do not sum to the step within
2%, if a planted sleep does not appear as its cause within 5%, or if measuring takes over 1%.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.config.recipe import Recipe
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.recipes import named_recipe
from parallel3d.watch.step_clock import CLOCK, Cause
from tests.one_rank import read_metrics

SLEEP_S = 0.5
STEPS = 8
LAYOUTS = (
    "pp=1 dp_shard=1 tp=1",
    "pp=1 dp_shard=2 tp=1 sharding=NO_SHARD",
    "pp=1 dp_shard=2 tp=1 sharding=FULL_SHARD recompute=full",
    "pp=1 dp_shard=1 tp=2 recompute=selective",
    "pp=2 dp_shard=1 tp=1",
    "pp=1 dp_shard=1 cp=2 tp=1",
    "pp=2 dp_shard=2 tp=1 sharding=SHARD_OPTIMIZER",
    "pp=2 dp_shard=1 tp=2 schedule=zb_h1",
)
SMALL = (
    "train.sample_tokens=0 train.eval_every=null train.seq_len=32 model.layers=2 model.hidden=32 "
    "model.heads=2 model.ffn_hidden=64 parallel.microbatch_size=4 train.global_batch_size=16 "
    f"train.steps={STEPS} logging.every=1 checkpoint.every=null checkpoint.in_background=false"
)
PLANTED_IN = {  # place -> cause
    "loader": "data",
    "last stage": "compute",
    "gradient reduction": "dp",
    "optimizer": "optimizer",
    "save": "checkpoint",
}
PLANTED_LAYOUT = "pp=2 dp_shard=2 tp=1 sharding=NO_SHARD"


def main() -> int:
    has_failed = False
    for layout in LAYOUTS:
        lines = run(layout)
        ratio = median(sum(line["time_s"].values()) / line["step_time_s"] for line in lines)
        has_failed |= abs(ratio - 1) > 0.02
        parts = {cause: median(line["time_s"][cause] for line in lines) for cause in PARTS}
        shares = ", ".join(f"{cause} {1e3 * part:.1f}" for cause, part in parts.items() if part)
        print(f"{layout}: causes / step {ratio:.4f}; ms: {shares}", flush=True)
    before = run(PLANTED_LAYOUT)
    for place, cause in PLANTED_IN.items():
        saves = "checkpoint.every=1" if place == "save" else ""
        usual = run(PLANTED_LAYOUT, saves=saves) if saves else before
        lines = run(PLANTED_LAYOUT, place, saves)
        own_s, usual_s = (median(line["time_s"][cause] for line in each) for each in (lines, usual))
        ratio = (own_s - usual_s) / SLEEP_S
        has_failed |= abs(ratio - 1) > 0.05
        print(f"sleep in {place}: {cause} grows by {ratio:.3f} of it", flush=True)
    for layout in ("pp=1 dp_shard=1 tp=1", "pp=2 dp_shard=1 tp=2"):
        run(layout, "clock", "model.layers=8 train.steps=400 logging.every=100")
    return has_failed


PARTS = ("compute", "recompute", "tp", "cp", "pp_bubble", "pp_p2p", "dp", "optimizer", "other")


def run(layout: str, place: str = "", saves: str = "") -> list[dict[str, Any]]:
    """Trains a small model, with a sleep in one place per step. Returns its steady lines."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"parallel.{setting}" for setting in layout.split()]
        overrides = [*SMALL.split(), *settings, *saves.split(), f"run_dir={folder}/run"]
        recipe = named_recipe("quickstart", overrides)
        sys.stderr.flush()
        target = "tests.time_causes:train"
        status = launch_local(target, recipe, recipe.parallel.world_size, arguments=[place])
        assert status == 0, layout
        return read_metrics(Path(folder) / "run")[3:]


def train(recipe: Recipe, rendezvous: Rendezvous, place: str) -> None:
    """Runs a worker with the sleep that `place` names."""
    from parallel3d import recipes
    from parallel3d.models import decoder
    from parallel3d.sharding.buckets import Bucket
    from parallel3d.training import loop, trainer

    if place == "loader":
        batches_ahead = loop.batches_ahead

        def slow_batches(*args: Any) -> Iterator[Any]:
            for batch in batches_ahead(*args):
                time.sleep(SLEEP_S)
                yield batch

        loop.batches_ahead = slow_batches  # type: ignore[assignment]
    elif place == "last stage":
        forward = decoder.Decoder.forward

        def slow_stage(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.head is not None:
                time.sleep(SLEEP_S / recipe.microbatches)
            return forward(self, *args, **kwargs)

        decoder.Decoder.forward = slow_stage  # type: ignore[method-assign]
    elif place == "gradient reduction":
        start = Bucket.start_reduction

        def start_slow(self: Any) -> None:
            start(self)
            if self is not getattr(start_slow, "first", self):
                return
            start_slow.first = self  # type: ignore[attr-defined]
            self._pending = slowed(self._pending)

        Bucket.start_reduction = start_slow  # type: ignore[method-assign]
    elif place == "optimizer":
        build = trainer.build_optimizer

        def build_slow(*args: Any) -> Any:
            optimizer = build(*args)
            optimizer.step = slowed(optimizer.step)
            return optimizer

        trainer.build_optimizer = build_slow
    elif place == "clock":
        loop.TrainingLoop.measured = in_turn(loop.TrainingLoop.measured)  # type: ignore[method-assign]
    elif place == "save":
        loop.Saver.save = slowed(loop.Saver.save)  # type: ignore[method-assign]
    recipes.work(recipe, rendezvous)


def in_turn(measured: Callable[..., Any]) -> Callable[..., Any]:
    """Stops the clock in every second step, and prints the ratio of CPU times at the end."""
    used: dict[bool, list[float]] = {True: [], False: []}

    @contextmanager
    def measured_in_turn(self: Any, cause: Cause = "other") -> Iterator[None]:
        runs = self.trainer.step % 2 == 0
        start_s = time.process_time()
        with measured(self, cause):
            if not runs:
                CLOCK.switch(None)
            yield
        used[runs].append(time.process_time() - start_s)
        if self.trainer.step == self.recipe.train.steps:
            ratio = median(used[True]) / median(used[False])
            print(f"CPU time with the clock / without: {ratio:.4f}", flush=True)
            assert ratio <= 1.01

    return measured_in_turn


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLEEP_S)
        return function(*args, **kwargs)

    return slow


if __name__ == "__main__":
    sys.exit(main())
