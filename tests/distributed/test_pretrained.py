"""A model of transformers that no rank ever has whole: built without memory, split, filled from
safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from parallel3d.convert import pretrained
from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.pretrained import load_safetensors, parameters_on_meta
from parallel3d.errors import CheckpointError
from parallel3d.layers.weight_gradients import local_tensor
from tests.distributed.test_families import VOCAB, B, S, build, whole


def save(kind: str, folder: Path, **options: Any) -> nn.Module:
    """Saves a state dict in several files with an index."""
    model = build(kind, **options)
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def load_split(
    kind: str,
    folder: Path,
    options: dict[str, Any],
) -> None:
    """The logits of the saved model, and of what was read only this rank's part."""
    reference = build(kind, **options)
    ids = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(0))
    with parameters_on_meta():
        model = type(reference)(reference.config)  # type: ignore[arg-type]
    assert all(parameter.is_meta for parameter in model.parameters())
    tensor_parallelize(model, init_device_mesh("cpu", (get_world_size(),)))
    read: list[int] = []
    own_slice = pretrained._own_slice

    def counted(*args: Any) -> torch.Tensor:
        values = own_slice(*args)
        read.append(values.untyped_storage().nbytes())
        return values

    with mock.patch.object(pretrained, "_own_slice", counted):
        load_safetensors(model, folder)
    assert sum(read) == sum(
        local_tensor(parameter.detach()).nbytes for parameter in model.parameters()
    )
    named = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert isinstance(named[name], DTensor) or get_world_size() == 1
        assert torch.equal(whole(named[name]), parameter), name
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "size, kind, options",
    [
        (4, "llama", {"num_key_value_heads": 2}),
        (2, "qwen2, tied", {}),
        (2, "gpt2", {"tie_word_embeddings": True}),
        (1, "llama", {}),
    ],
    ids=["llama, shared heads", "qwen2, tied", "gpt2", "one process"],
)
def test_each_rank_reads_its_part_alone(
    world: Callable, tmp_path: Path, size: int, kind: str, options: dict[str, Any]
) -> None:
    save(kind, tmp_path, **options)
    world(size).run(load_split, kind, tmp_path, options)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(
        CheckpointError,
        match="k_proj.weight has shape .*, but the module needs .*; use the checkpoint",
    ):
        load_safetensors(build("llama", num_key_value_heads=2), tmp_path)
    with pytest.raises(
        CheckpointError, match="tensor .*q_proj.bias is missing; use the checkpoint"
    ):
        load_safetensors(build("qwen2, tied", tie_word_embeddings=False), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_safetensors(build("llama"), tmp_path / "missing")
    with torch.device("meta"):
        bare = type(build("llama"))(build("llama").config)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"buffers without values .*inv_freq.* within"):
        load_safetensors(bare, tmp_path)
