#!/usr/bin/env bash
# {{gpus}} devices, {{nodes}} node(s) of {{per_node}}. SCHEDULER is one of `torchx runopts`: slurm, kubernetes, local_cwd, ...
#     {{start}}
# More arguments are overrides of the recipe, such as train.steps=20. Its file must be where the workers run.
set -euo pipefail

# NCCL's flight recorder: each rank keeps its last 2000 operations, and where one times out it writes them into the run's
# folder, in nccl_flight_record_rank_N, which says on what the ranks waited and which of them did not come.
# The allocator grows its segments in place. Otherwise, when memory runs out, it frees what it has cached by a call that
# waits for the whole device, for which two ranks of a pipeline in the middle of a step can wait for ever.
exec torchx run --scheduler "${SCHEDULER:-local_cwd}" dist.ddp \
    --env TORCH_FR_BUFFER_SIZE=2000,TORCH_NCCL_DUMP_ON_TIMEOUT=1,PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    --name {{name}} \
    -j {{nodes}}x{{per_node}} --gpu {{per_node}} \
    -m parallel3d.recipes.pretrain -- {{recipe}} "$@"
