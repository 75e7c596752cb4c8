"""Generates text with one forward of the pipeline per token. Every layout generates the same text."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.data.tokenizer import Tokenizer
from parallel3d.mesh import Axis
from parallel3d.training.trainer import Trainer


def generate(trainer: Trainer, tokenizer: Tokenizer, *, prompt: str, tokens: int, top_k: int) -> str:
    """Returns the prompt and up to `tokens` tokens after it (fewer where the document ends), each drawn from the
    `top_k` most likely (1: greedy) by a generator seeded with the run's seed. Every rank calls it and gets the same
    text."""
    seq_len = trainer.recipe.train.seq_len
    ids = [int(i) for i in tokenizer.encode(prompt)][-seq_len:] or [tokenizer.end_of_text]
    prompt_length = len(ids)
    generator = torch.Generator().manual_seed(trainer.recipe.train.seed)
    for _ in range(tokens):
        window = ids[-seq_len:]
        # Every window is padded to the length of training, because causal attention does not look ahead.
        padded = window + window[-1:] * (seq_len - len(window))
        outputs = trainer.logits(torch.tensor(padded).view(1, 1, seq_len))
        logits = None
        if outputs:  # ids beyond the tokenizer's only make the vocabulary divisible
            logits = _whole_vocabulary(outputs[0][0, len(window) - 1], trainer.axes["tp"])[: tokenizer.vocab_size]
        ids.append(_choose(logits, top_k, generator, trainer.axes["pp"], trainer.pipeline.last_rank, trainer.device))
        if ids[-1] == tokenizer.end_of_text:
            break
    return prompt + tokenizer.decode(np.array(ids[prompt_length:]))


def _whole_vocabulary(logits: Tensor, tp: Axis) -> Tensor:
    """Gathers this tp rank's logits [vocab / tp] into all logits [vocab]."""
    if tp.size == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(tp.size)]
    dist.all_gather(parts, logits.contiguous(), group=tp.group)
    return torch.cat(parts)


def _choose(
    logits: Tensor | None, top_k: int, generator: torch.Generator, pp: Axis, last_rank: int, device: torch.device
) -> int:
    """Chooses the next token on the rank of the last stage, and broadcasts it to the pipeline's other ranks."""
    token = torch.zeros((), dtype=torch.int64, device=device)
    if logits is not None:
        likely, candidates = logits.float().cpu().topk(min(top_k, logits.numel()))
        token.fill_(candidates[torch.multinomial(likely.softmax(dim=-1), 1, generator=generator)].item())
    if pp.size > 1:
        dist.broadcast(token, group=pp.group, group_src=last_rank)
    return int(token.item())
