# NCCL flight recorder: each rank keeps its last operations and writes them after a timeout to
# nccl_flight_record_rank_N in the folder of the run. They show which operation each rank waited for.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# NCCL then names the link, device or memory that failed. Without this, torch reports only that NCCL has failed.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# The allocator grows its segments in place. Otherwise, when memory runs out, it frees its cache with a call that waits
# for the device. In the middle of a step, this can deadlock two ranks of a pipeline.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# One CPU thread per worker leaves cores for the threads that launch kernels and read data.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
