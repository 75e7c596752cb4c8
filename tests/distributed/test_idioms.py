"""What torch's users do to any module, done to a model of this library's layers and to converted
models of transformers, on two processes: it works as on one, or it is refused by a line that says
what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.parameter import draw
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.sharding.apply import shard

PRELOAD = ("transformers.models.gpt2.modeling_gpt2",)
VOCAB, HIDDEN, S = 101, 32, 12
KINDS = ["layers", "gpt2"]


class OfLayers(nn.Module):
    def __init__(self, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, tp=tp)
        self.positions = LearnedPositions(S, HIDDEN, tp=tp)
        self.norm = LayerNorm(HIDDEN, tp=tp)
        self.attention = ParallelAttention(HIDDEN, 4, 2, tp=tp)
        self.mlp = ParallelMLP(HIDDEN, 64, tp=tp, bias=True)
        self.head = ColumnParallelLinear(
            HIDDEN,
            104,
            tp=tp,
            gather_output=True,
            bias=True,
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embed(ids))
        x = x + self.attention(self.norm(x))
        y: Tensor = self.head(x + self.mlp(x))
        return y


def build(kind: str, tp: DeviceMesh | None) -> Any:
    torch.manual_seed(0)
    if kind == "layers":
        return OfLayers(tp)
    import transformers as hf

    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=S,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    return model if tp is None else tensor_parallelize(model, tp, check=False)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def logits(output: Any) -> Tensor:
    y: Tensor = output if isinstance(output, Tensor) else output.logits
    return y


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


IDS = torch.arange(2 * S).view(2, S) % VOCAB


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def reset_it(kind: str) -> None:
    """Without memory, then with some, then reset: the layers start as from their constructors,
    torch's own as a whole model that is reset likewise."""
    tp = mesh()
    models = []
    for axis in (tp, None):
        model = build(kind, axis).to("meta").to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        models.append(dict(model.named_parameters()))
    split, alone = models
    references = [alone]
    if kind == "layers":
        references.append(dict(build(kind, None).named_parameters()))
    for reference in references:
        for name, parameter in reference.items():
            assert torch.equal(whole(split[name]), parameter)


def init_weights(module: nn.Module) -> None:
    """As pages of torch's users have it."""
    if isinstance(module, nn.Linear):
        draw(module.weight, partial(nn.init.trunc_normal_, std=0.02))
        if module.bias is not None:
            nn.init.uniform_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)


def apply_it(kind: str) -> None:
    tp = mesh()
    found = []
    for model in (build(kind, tp), build(kind, None)):
        torch.manual_seed(1)
        model.apply(init_weights)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.kaiming_normal_(parameter)
        found.append([whole(p) for p in model.parameters()] + [torch.rand(1)])
    assert all(map(torch.equal, *found))


def exchange_states(kind: str) -> None:
    """Loads a plain state dict of a whole model into a split one, and back."""
    model = build(kind, mesh())
    alone = build(kind, None)
    changed = {name: value + 1 for name, value in alone.state_dict().items()}
    assert str(model.load_state_dict(changed)) == "<All keys matched successfully>"
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert list(gathered) == list(changed)
    assert str(alone.load_state_dict(gathered)) == "<All keys matched successfully>"
    for name, value in alone.state_dict().items():
        assert torch.equal(value, changed[name]) and torch.equal(
            whole(model.state_dict()[name]), value
        ), name
    assert "Tensor" in refusal(lambda: build(kind, None).load_state_dict(model.state_dict()))


def autocast_it(kind: str) -> None:
    tp = mesh()
    found = []
    for model in (build(kind, tp), build(kind, None)):
        with torch.autocast("cpu", torch.bfloat16):
            y = logits(model(IDS))
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        found.append([y.detach().float(), *(whole(p.grad) for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 0.03 * float(theirs.abs().max())


def copy_after_backward(kind: str) -> None:
    """Copies models with gradients: their own tensors, or views into the buckets of data
    parallelism."""
    axes = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    for strategy in (None, "NO_SHARD"):
        model = build(kind, axes["tp"])
        if strategy is not None:
            shard(model, axes, strategy)
        before = logits(model(IDS))
        before.sum().backward()
        for other in (copy.deepcopy(model), AveragedModel(model).module):
            assert torch.equal(logits(other(IDS)), before)
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(whole(ours.grad), whole(theirs.grad))
                theirs.detach().fill_(2.0)
        assert torch.equal(logits(model(IDS)), before)


class Adapter(nn.Module):
    """What peft puts in the place of a linear layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x)


def add_an_adapter() -> str:
    model = build("gpt2", mesh())
    block = model.transformer.h[0].attn
    block.c_attn = Adapter(block.c_attn)
    return refusal(lambda: model(IDS))


def test_an_adapter_that_is_added_after_the_split_is_refused(world: Callable) -> None:
    for error in world(2).run(add_an_adapter):
        assert error.startswith("transformer.h.0.attn.c_attn.down.weight: was added after")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "idiom",
    [copy_after_backward, reset_it, apply_it, exchange_states, autocast_it],
    ids=lambda idiom: idiom.__name__,
)
def test_it_gives_what_it_gives_on_one_process(
    world: Callable, idiom: Callable[[str], None], kind: str
) -> None:
    world(2).run(idiom, kind)
