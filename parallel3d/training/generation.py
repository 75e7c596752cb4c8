"""Text generation with a trainer's model, in any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from parallel3d.config.hugging_face import config_path, read_config_json
from parallel3d.config.recipe import ModelConfig, TrainConfig
from parallel3d.data.loader import documents_ended_by
from parallel3d.data.tokenizers import Tokenizer
from parallel3d.layers.collectives import all_reduce, gather
from parallel3d.mesh import Role
from parallel3d.training.trainer import Trainer


def generate(trainer: Trainer, tokenizer: Tokenizer, train: TrainConfig) -> str:
    """Generates text after `train.sample_prompt`. Collective: all ranks get the same text.

    Generation stops after `train.sample_tokens` tokens or an end-of-text token. Each token takes
    one forward pass of the pipeline over the last `train.seq_len` tokens.

    Returns:
        The full prompt and the generated text.
    """
    train = sampling(trainer.recipe.model, train)
    seq_len = train.seq_len
    tp = trainer.axes[Role.SPLIT_TENSORS]
    pp = trainer.axes[Role.SPLIT_LAYERS]
    part = trainer.sequence_part
    ids = tokenizer.encode(train.sample_prompt).tolist()[-seq_len:] or [tokenizer.end_of_text]
    prompt_length = len(ids)
    end_of_text = tokenizer.end_of_text if trainer.recipe.data.documents == "mask" else None
    seed = train.seed if train.sample_seed is None else train.sample_seed
    generator = torch.Generator().manual_seed(seed)
    for _ in range(train.sample_tokens):
        window = ids[-seq_len:]
        # Every window is padded to the training sequence length. Causal attention ignores the
        # padding.
        padded = window + [0] * (seq_len - len(window))
        batch = torch.tensor(padded).view(1, 1, seq_len)
        outputs = trainer.logits(batch, documents_ended_by(end_of_text, batch))
        token = torch.zeros((), dtype=torch.int64, device=trainer.device)
        if outputs:  # Only the ranks of the last stage have logits.
            # The sum broadcasts the logits of the last token, which one rank has.
            is_last = part.positions(seq_len, trainer.device) == len(window) - 1
            own = outputs[0][0].masked_fill(~is_last.unsqueeze(1), 0.0).sum(0)
            logits = gather(all_reduce(own, part.axis), tp, dim=0)  # [vocab / tp] -> [vocab]
            # Ids beyond the tokenizer's vocabulary are padding, so they are not drawn.
            token.fill_(draw(logits[: tokenizer.vocab_size].float().cpu(), train, generator))
        # The sum broadcasts the token, which is 0 on all other stages.
        ids.append(int(all_reduce(token, pp)))
        if ids[-1] == tokenizer.end_of_text:
            break
    return train.sample_prompt + tokenizer.decode(np.array(ids[prompt_length:]))


def draw(logits: Tensor, train: TrainConfig, generator: torch.Generator) -> int:
    """Samples a token id from logits [vocab] with top-k, top-p and temperature of `train`."""
    likely, candidates = logits.topk(min(train.sample_top_k, logits.numel()))
    probabilities = (likely / train.sample_temperature).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of more likely tokens
    probabilities = probabilities.masked_fill(before >= train.sample_top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return int(candidates[drawn])


def sampling(model: ModelConfig, train: TrainConfig) -> TrainConfig:
    """Returns `train` with the sampling of the generation_config.json that lies next to
    `model.config`, unless the recipe samples in its own way."""
    path = config_path(model).with_name("generation_config.json")
    if model.config is None or train.sample_top_k > 1 or not path.is_file():
        return train
    own = read_config_json(path)
    if not own.get("do_sample"):
        return train
    return replace(
        train,
        sample_top_k=own.get("top_k") or 50,
        sample_top_p=own.get("top_p") or 1.0,
        sample_temperature=own.get("temperature") or 1.0,
    )
