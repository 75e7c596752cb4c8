"""The memory estimate of Hugging Face models against dry runs, by family and layout.

`python tests/hf_memory_grid.py --families gemma2 gpt2` ends with 1 where an estimate is further off
than the bars. Without `--families` it takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel3d.config.hugging_face import sizes_of
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.tools.verify.command import Verified, verify

MOST_BELOW = 0.03
MOST_ABOVE = 0.10
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
GATED = {
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
}
HEADS_128 = {**GATED, "head_dim": 128}
WINDOW = {**HEADS_128, "sliding_window": 1024}
WIDE = {"intermediate_size": 8192}
EXPERTS = {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
GPT2 = {
    "n_embd": 2048,
    "n_layer": 4,
    "n_head": 16,
    "n_positions": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "phi3", "olmo", "olmo2", "granite", "smollm3"), GATED),
    **dict.fromkeys(("stablelm", "cohere", "ernie4_5"), GATED),
    **dict.fromkeys(("qwen3", "gemma", "glm", "glm4"), HEADS_128),
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "cohere2", "exaone4"), WINDOW),
    "starcoder2": {**WIDE, "num_key_value_heads": 4},
    **dict.fromkeys(("gpt_neox", "phi"), WIDE),
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4, "ffn_hidden_size": 8192},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 8192, "word_embed_proj_dim": 2048},
    "mixtral": {**GATED, **EXPERTS},
}
# Families without rules for sequence parallelism.
WHOLE_SEQUENCES = {"olmo", "olmo2", "stablelm", "glm", "glm4", "falcon", "opt", "phi", "mixtral"}
LAYOUTS = {
    "one process": ParallelConfig(),
    "tp": ParallelConfig(tp=2),
    "sequence parallel": ParallelConfig(tp=2, sequence_parallel=True),
    "pp": ParallelConfig(pp=2),
    "dp_shard": ParallelConfig(dp_shard=4),
    "full": ParallelConfig(recompute="full"),
    "selective": ParallelConfig(recompute="selective"),
}


def model_section(family: str, folder: Path, **keys: Any) -> ModelConfig:
    """Writes a config.json, and returns the section that names it."""
    path = folder / f"{family}.json"
    config = {"model_type": family, **SIZES, **FAMILIES[family], **keys}
    path.write_text(json.dumps(config))
    sizes = sizes_of(config, path)
    return ModelConfig(
        name=family,
        architecture="transformers",
        config=str(path),
        **sizes,
    )


def compared(
    model: ModelConfig, parallel: ParallelConfig, precision: str = "bf16", seq_len: int = 4096
) -> Verified:
    """Two microbatches on rank 0."""
    train = TrainConfig(
        steps=1,
        global_batch_size=2 * parallel.dp,
        seq_len=seq_len,
        precision=precision,  # type: ignore[arg-type]
    )
    return verify(Recipe(model=model, train=train, parallel=parallel, run_dir="runs/verify"), 0)


def main() -> int:
    """Prints a line for each family and precision. Returns 1 if an estimate is outside the bars."""
    parser = argparse.ArgumentParser(description="dry runs of Hugging Face models")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--seq-len", type=int, default=4096)
    options = parser.parse_args()
    errors = []
    for family in options.families:
        for precision in options.precisions:
            if family == "mixtral" and precision == "fp32":
                continue  # torch's grouped matmul takes no fake tensors in float32.
            line = f"{family:12} {precision}"
            for name, layout in LAYOUTS.items():
                if layout.sequence_parallel and family in WHOLE_SEQUENCES:
                    continue
                with TemporaryDirectory() as folder:
                    model = model_section(family, Path(folder))
                    found = compared(model, layout, precision, options.seq_len)
                errors.append(found.difference)
                line += f"  {name} {found.difference:+.1%}"
            print(line, flush=True)
    print(f"lowest {min(errors):+.2%} (bar -3%), highest {max(errors):+.2%} (bar +10%)")
    return int(min(errors) < -MOST_BELOW or max(errors) > MOST_ABOVE)


if __name__ == "__main__":
    sys.exit(main())
