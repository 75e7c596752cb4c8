# NCCL's flight recorder: each rank keeps its last operations. If one times out, the rank writes them to
# nccl_flight_record_rank_N in the run's folder, which shows what the ranks waited for and which did not come.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# NCCL names the link, device or memory that it could not use; torch only says that NCCL has failed.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# The allocator grows its segments in place. Otherwise, when memory runs out, it frees its cache by a call that waits for
# the whole device, for which two ranks of a pipeline in a step can wait for ever.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# The GPUs compute. More threads on the CPU would take the cores from those that launch kernels and read data.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
