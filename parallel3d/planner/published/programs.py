"""The programs of published runs: what each training program did, mechanism by mechanism.

A field differs from the default only where the program's paper, code or notes say so; docs/planner.md lists the
reasons. None of them depends on a particular run.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.program import PARALLEL3D, TrainingProgram

# Megatron-LM of 2021 and 2022: a fused scale-mask-softmax between batched matmuls, dropout, float32 gradients reduced
# after the last backward, nothing of tp hidden (arXiv 2104.04473; 2205.05198).
MEGATRON_2021 = TrainingProgram(
    name="megatron-2021",
    attention="softmax",
    elementwise=1.0,
    dropout=True,
    loss_passes=20.0,
    logit_bytes=10.0,
    default_recompute="selective",
    fp16_gradient_bytes=6.0,  # fp16 ones of autograd, and the float32 copy that the optimizer takes
    fp16_reduce_bytes=2.0,  # and what is reduced are the former, flattened into one tensor first:
    step_bytes=2.0,  # megatron/model/distributed.py of 2021, allreduce_params
)
# The PTD runs on Selene gather optimizer-sharded nothing; the later paper adds sequence parallelism.
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="megatron-deepspeed",
    blocking=True,  # CUDA_LAUNCH_BLOCKING=1, bigscience chronicles-prequel
    embedding_slots=True,
    moments_at_start=True,  # deepspeed/runtime/fp16/*.py, `initialize_optimizer_states`
    gradient_bytes=6.0,  # bf16 ones and DeepSpeed's float32 sum
    fp16_gradient_bytes=2.0,
    fragmentation=0.25,
    cache_bytes=8.0e9,  # all-gather and reduce buckets of 5e8 elements, twice (DeepSpeed's defaults)
    context_bytes=4.0e9,  # CUDA, and NCCL's buffers of a dozen groups
)
# DeepSpeed ZeRO-3 of 2021 gathers parameter by parameter over one ring, at most 1e9 at once (its default), and
# prefetches by a trace that often misses.
DEEPSPEED_ZERO3 = replace(
    MEGATRON_2021, name="deepspeed-zero3", one_ring=True, reduce_bytes=2.0, prefetch=0.7, gathered_parameters=1e9
)
# Megatron-Core with Transformer TrainingProgram: fused kernels, distributed optimizer overlapped.
MEGATRON_CORE = TrainingProgram(
    name="megatron-core",
    loss_passes=16.0,
    gradients_hidden=0.9,
    gathers_hidden=0.9,
    p2p_hidden=0.5,
    fused_mlp=True,  # megatron/core/fusions/fused_bias_swiglu.py
    logit_bytes=6.0,  # 16 bits, and float32 worked on in place (megatron/core/tensor_parallel/cross_entropy.py)
    default_schedule="interleaved_1f1b",
    default_sequence_parallel=True,
)
# NeMo adds tp traffic cut into pieces beside the matmuls (userbuffers).
NEMO = replace(MEGATRON_CORE, name="nemo", tp_hidden=0.6, p2p_hidden=0.9)
TORCHTITAN = TrainingProgram(
    name="torchtitan",
    elementwise=2.4,
    launches=60,
    loss_passes=30.0,
    logit_bytes=12.0,
    weight_bytes=4.0,
    optimizer_bytes=8.0,
    hopper_attention=0.62,  # scaled_dot_product_attention: FlashAttention-2 on Hopper
    norm_extra_bytes=4.0,
)
TORCHTITAN_COMPILED = replace(
    TORCHTITAN, name="torchtitan-compiled", norm_extra_bytes=0.0, elementwise=1.2, loss_passes=16.0
)
# Since 2025 the loss is compiled too (torchtitan/components/loss.py): logits and their gradient in 16 bits alone.
TORCHTITAN_COMPILED_2025 = replace(
    TORCHTITAN_COMPILED, name="torchtitan-compiled-2025", loss_passes=8.0, logit_bytes=4.0
)
COMPOSER = TrainingProgram(
    name="composer-fsdp",
    elementwise=2.0,
    loss_passes=20.0,  # flash-attention's cross-entropy, in place
    logit_bytes=4.0,
    attention_speed=0.66,
    early_hopper=True,
    weight_bytes=4.0,
    optimizer_bytes=8.0,
)
FMS_FSDP = replace(COMPOSER, name="fms-fsdp", elementwise=2.0, attention_speed=0.8)
MAXTEXT = replace(
    COMPOSER, name="maxtext", elementwise=1.0, attention_speed=0.8, early_hopper=False, default_recompute="full"
)
NANOTRON = TrainingProgram(
    name="nanotron",
    cut_tensors=6,  # src/nanotron/optim/zero.py, `_all_gather_params`; likewise where gradients are reduced
    gradient_bytes=6.0,
    norm_extra_bytes=12.0,
    rope_copies=2.0,
    elementwise=1.4,
    loss_passes=20.0,
    hopper_attention=0.62,
    default_sequence_parallel=True,
)
INTERNEVO = TrainingProgram(
    name="internevo",
    elementwise=2.2,
    attention_speed=0.7,  # FlashAttention 1
    loss_passes=20.0,
    fused_weight_gradient=False,
    reduce_bytes=2.0,
    gradients_hidden=0.2,
    gathers_hidden=0.5,
    broadcast_s=4e-3,
    # internlm/solver/optimizer/hybrid_zero_optim.py, `_step`: gradients in bf16, at the step flat and in float32 too
    # (2 + 4), and the two temporaries of an AdamW that is not fused (8); utils.py, `reduce_grads`: for the norm each
    # gradient once more in float32.
    gradient_bytes=2.0,
    step_bytes=14.0,
    step_cached_bytes=4.0,
    rest_last=True,  # internlm/core/.../utils.py, `partition_uniform`
)
# fsdp_optimizer.py, `step`: nothing flat, and float32 gradients of the same sizes as those for the norm.
INTERNEVO_FSDP = replace(INTERNEVO, name="internevo-fsdp", step_bytes=12.0, step_cached_bytes=0.0)
ZERO_BUBBLE = replace(MEGATRON_2021, name="zero-bubble")  # a fork of Megatron-LM, its fused softmax kept
SCALING = TrainingProgram(
    name="scaling",
    elementwise=1.9,
    loss_passes=24.0,
    tp_speed=0.45,
    gathers_logits=True,
    logit_bytes=18.0,
    gradient_bytes=2.0,
    rope_copies=1.0,
    fragmentation=0.12,
)  # Aleph Alpha, FlashAttention-2
UNKNOWN = replace(MEGATRON_CORE, name="unknown")
UNKNOWN_FSDP = replace(TORCHTITAN, name="unknown-fsdp")  # PyTorch's, hence likely its operators too

# The first that is part of a case's `framework` (in lower case) decides.
_BY_FRAMEWORK: tuple[tuple[str, TrainingProgram], ...] = (
    ("deepspeed zero-3", DEEPSPEED_ZERO3),
    ("megatron-deepspeed", MEGATRON_DEEPSPEED),
    ("zero-bubble", ZERO_BUBBLE),
    ("torchtitan", TORCHTITAN),
    ("llm-foundry", COMPOSER),
    ("composer", COMPOSER),
    ("fms-fsdp", FMS_FSDP),
    ("maxtext", MAXTEXT),
    ("automodel", replace(TORCHTITAN_COMPILED, name="automodel", weight_bytes=2.0, hopper_attention=1.0)),
    ("nanotron", NANOTRON),
    ("internevo", INTERNEVO),
    ("aleph", SCALING),
    ("neox", MEGATRON_2021),
    ("nemo", NEMO),
    ("megatron-bridge", NEMO),
    ("megatron-core", MEGATRON_CORE),
    ("megascale", NEMO),
)


_BY_DATE = (MEGATRON_2021, TORCHTITAN_COMPILED, TORCHTITAN_COMPILED_2025)
PROGRAMS = {
    program.name: program
    for program in (PARALLEL3D, *_BY_DATE, INTERNEVO_FSDP, *(program for _, program in _BY_FRAMEWORK))
}


def named_program(name: str) -> TrainingProgram:
    """Raises ConfigError with the nearest names, or all."""
    if name not in PROGRAMS:
        near = get_close_matches(name, PROGRAMS, n=3)
        advice = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(sorted(PROGRAMS))}"
        raise ConfigError(f"--engine {name}: unknown; {advice}")
    return PROGRAMS[name]


def program_of(framework: str, *, compiled: bool, early: bool, year: int, fsdp: bool) -> TrainingProgram:
    """Returns the program of a case. Megatron-LM is two programs; `early`: before Megatron-Core (2023). `year`: of the
    run, as far as its source says, else 0. `fsdp`: it shards parameters, and has no pipeline."""
    text = framework.lower()
    for part, program in _BY_FRAMEWORK:
        if part in text:
            if compiled and program is TORCHTITAN:
                return TORCHTITAN_COMPILED_2025 if year >= 2025 else TORCHTITAN_COMPILED
            return INTERNEVO_FSDP if fsdp and program is INTERNEVO else program
    if "megatron" in text:
        return MEGATRON_2021 if early else MEGATRON_CORE
    if "parallel3d" in text:
        return PARALLEL3D
    return UNKNOWN_FSDP if fsdp else UNKNOWN


def in_precision(program: TrainingProgram, precision: str) -> TrainingProgram:
    """The program with what it does otherwise in fp16."""
    if precision != "fp16":
        return program
    gradient, reduced = program.fp16_gradient_bytes, program.fp16_reduce_bytes
    return replace(
        program,
        gradient_bytes=program.gradient_bytes if gradient is None else gradient,
        reduce_bytes=program.reduce_bytes if reduced is None else reduced,
    )
