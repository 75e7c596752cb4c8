"""Plants small faults in a copy of the tree, one after the other, and runs the tests that should
find each: `python tests/mutations.py [NAME ...]`. Without a name it plants all. It exits with 1
if a fault is not found, or if the text that it replaces is not there exactly once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = """\
sum over tp forgotten | parallel3d/layers/regions.py | return all_reduce(x.clone(), axis) | return x.clone() | tests/distributed/test_layers_regions.py
gradient of a copied region | parallel3d/layers/regions.py | forward=_alias, backward=_sum) | forward=_alias, backward=_alias) | tests/distributed/test_layers_regions.py
gather without reduction | parallel3d/layers/regions.py | forward=gather, backward=reduce_scatter) | forward=gather, backward=_own_part) | tests/distributed/test_layers_regions.py
wrong shard of a region | parallel3d/mesh.py | rows.start, len(rows)) | full.shape[dim] - rows.stop, len(rows)) | tests/distributed/test_layers_regions.py
rotation of the wrong sign | parallel3d/layers/positions.py | self.head_dim // 2] *= -1.0 | self.head_dim // 2] *= 1.0 | tests/test_layers_positions.py
inverse rotation forgotten | parallel3d/layers/positions.py | positions, -1.0), None | positions, 1.0), None | tests/test_layers_positions.py tests/distributed/test_layers_attention.py
last shard one row short | parallel3d/shard_sizes.py | rank * each : (rank + 1) * each] | rank * each : (rank + 1) * each - 1] | tests/test_shard_sizes.py
tied gradients not summed | parallel3d/engine.py | dist.all_reduce(shared, group=self._ends.group) | pass | tests/distributed/test_parity.py
norm gradients not summed | parallel3d/engine.py | p.spec.partial_gradient and self._tp.size > 1 | p.spec.partial_gradient and self._tp.size > 9 | tests/distributed/test_parity.py
warm-up one step late | parallel3d/training/learning_rate.py | config.lr * step / config.warmup_steps | config.lr * (step - 1) / config.warmup_steps | tests/test_metrics.py
cosine without its half | parallel3d/training/learning_rate.py | 0.5 * (1.0 + math.cos(math.pi * progress)) | (1.0 + math.cos(math.pi * progress)) | tests/test_metrics.py
decoupled decay of the wrong sign | parallel3d/optimizers/muon.py | mul_(1 - decay) | mul_(1 + decay) | tests/test_optimizers.py tests/distributed/test_optimizers.py
momentum of Muon swapped | parallel3d/optimizers/muon.py | lerp_(gradient, 1 - momentum) | lerp_(gradient, momentum) | tests/test_optimizers.py tests/distributed/test_optimizers.py
adjusted rate of Muon | parallel3d/optimizers/muon.py | 0.2 * math.sqrt(max(rows, columns)) | 0.2 * math.sqrt(min(rows, columns)) | tests/test_optimizers.py tests/distributed/test_optimizers.py
every epoch in one order | parallel3d/data/order.py | seed_key ^ epoch.astype(np.uint64) | seed_key ^ np.zeros_like(epoch).astype(np.uint64) | tests/test_order.py tests/test_loader.py
skipped samples off by one | parallel3d/data/order.py | each.last - each.first + 1 | each.last - each.first | tests/test_order.py tests/distributed/test_skipped_data.py tests/test_loader.py
last window lost | parallel3d/data/windows.py | (len(self.stream) - 1) // self.seq_len | (len(self.stream) - 1) // self.seq_len - 1 | tests/test_evaluation.py
places of a V swapped | parallel3d/schedules/build.py | (*range(pp), *reversed(range(pp))) | (*range(pp), *range(pp)) | tests/test_schedule.py
shards of a table doubled | parallel3d/planner/model/parameters.py | return rows * self.columns * self.times | return rows * self.columns | tests/test_planner_parameters.py
own rows of the vocabulary | parallel3d/planner/model/parameters.py | return len(shard_rows(shape.vocab, rank, tp)) | return shape.vocab // tp | tests/test_planner_parameters.py tests/test_planner_shapes.py tests/test_plan_verify.py
a step's all-gather by parts | parallel3d/planner/time/collectives.py | share * whole_bytes / ring_bandwidth(cluster, group) + hops | whole_bytes / ring_bandwidth(cluster, group) + hops | tests/test_planner_cost.py
gradient of the z loss | parallel3d/layers/loss.py | 1.0 + 2.0 * self.z_loss * lse | 1.0 + self.z_loss * lse | tests/distributed/test_layers_vocabulary.py
warm-up of 1F1B one longer | parallel3d/schedules/classic.py | return pp - rank - 1 | return pp - rank | tests/test_schedule.py
warm-up of interleaved 1F1B | parallel3d/schedules/classic.py | return 2 * (pp - rank - 1) + | return (pp - rank - 1) + | tests/test_schedule.py
busy taken for idle | parallel3d/timeline/spans.py | 1.0 - sum(self.busy_s) / total_s | sum(self.busy_s) / total_s | tests/test_simulate.py
checksums not compared | parallel3d/checkpoint/manifest.py | if crc != expected: | if crc is None: | tests/test_checkpoint_command.py tests/distributed/test_checkpoint_files.py
checksum of the last piece only | parallel3d/checkpoint/pieces.py | crc = zlib.crc32(chunk, crc) | crc = zlib.crc32(chunk) | tests/test_checkpoint_command.py tests/distributed/test_checkpoint_files.py
loss divided by one token more | parallel3d/training/loss.py | losses.sum() / (self.tokens / self.scale) | losses.sum() / ((self.tokens + 1) / self.scale) | tests/distributed/test_parity.py
sharded gradients halved | parallel3d/sharding/fully_sharded.py | set_gradient_divide_factor(1.0) | set_gradient_divide_factor(2.0) | tests/distributed/test_parity.py
copies counted in the norm | parallel3d/sharding/optimizer_parts.py | math.prod(self.axes[name].size for name in self.repeated_over) | 1 | tests/distributed/test_parity.py
rank from axes in the wrong order | parallel3d/config/recipe.py | in reversed(self.axes.items()): | in self.axes.items(): | tests/test_mesh.py tests/test_config.py tests/distributed/test_mesh.py
"""  # noqa: E501


def main() -> int:
    faults = {}
    for line in FAULTS.strip().splitlines():
        name, *fault = line.split(" | ")
        faults[name] = fault
    chosen = sys.argv[1:] or list(faults)
    for name in chosen:
        if name not in faults:
            sys.exit(f"error: {name}: no such fault; known are: {', '.join(faults)}")
    is_missed = False
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "__pycache__")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        for name in chosen:
            file, old, new, tests = faults[name]
            text = (tree / file).read_text()
            if text.count(old) != 1:
                print(f"{'stale text':<16} {name}: {file} has {text.count(old)} times: {old}")
                is_missed = True
                continue
            (tree / file).write_text(text.replace(old, new))
            command = [sys.executable, "-m", "pytest", "-x", "-q", *tests.split()]
            environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
            (tree / file).write_text(text)
            # pytest exits with 1 if a test fails; any other status proves nothing
            verdict = {0: "not found", 1: "found"}.get(done.returncode, "error of pytest")
            is_missed |= done.returncode != 1
            print(f"{verdict:<16} {name}", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
