"""Writes text with a trainer's model, in whatever layout it is trained."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.data.tokenizers import Tokenizer
from parallel3d.layers.collectives import start_gather
from parallel3d.training.trainer import Trainer


def generate(trainer: Trainer, tokenizer: Tokenizer, *, prompt: str, tokens: int, top_k: int) -> str:
    """Returns the prompt and up to `tokens` tokens after it (fewer where the document ends), each drawn from the
    `top_k` most likely (1: greedy) by a generator seeded with the run's seed. It takes one forward of the pipeline
    per token. Every rank calls it and gets the same text, whatever the layout."""
    seq_len, tp, pp = trainer.recipe.train.seq_len, trainer.axes["tp"], trainer.axes["pp"]
    ids = [int(i) for i in tokenizer.encode(prompt)][-seq_len:] or [tokenizer.end_of_text]
    prompt_length = len(ids)
    generator = torch.Generator().manual_seed(trainer.recipe.train.seed)
    for _ in range(tokens):
        window = ids[-seq_len:]
        # Every window is padded to the length of training, because causal attention does not look ahead.
        padded = window + window[-1:] * (seq_len - len(window))
        outputs = trainer.logits(torch.tensor(padded).view(1, 1, seq_len))
        token = torch.zeros((), dtype=torch.int64, device=trainer.device)
        if outputs:  # this rank has the last stage, and chooses the token
            logits = start_gather(outputs[0][0, len(window) - 1], tp, dim=0)()  # [vocab / tp] -> [vocab]
            logits = logits[: tokenizer.vocab_size]  # ids beyond the tokenizer's only make the vocabulary divisible
            likely, candidates = logits.float().cpu().topk(min(top_k, logits.numel()))
            token.fill_(candidates[torch.multinomial(likely.softmax(dim=-1), 1, generator=generator)].item())
        if pp.size > 1:
            dist.broadcast(token, group=pp.group, group_src=trainer.pipeline.last_rank)
        ids.append(int(token.item()))
        if ids[-1] == tokenizer.end_of_text:
            break
    return prompt + tokenizer.decode(np.array(ids[prompt_length:]))
