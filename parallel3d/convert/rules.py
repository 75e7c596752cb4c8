"""Rules that say how `convert.apply.tensor_parallelize` splits a module over tp.

Rules map name patterns to styles. In a pattern, `*` matches one part of a module's name and `**`
any number of parts, including none: `model.layers.*.mlp.up_proj`, `**.mlp.up_proj`. A style is one
of the classes below, or a word: "column", "row", "vocab", "replicate". `convert.families` has the
rules for Hugging Face families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """Style of a linear layer with split output features.

    Modules that read its output see only this rank's features. Attribute names refer to the parent
    module and may have dots (`config.num_attention_heads`).

    Args:
        unit: Attribute with the number of features that stay together, such as `head_dim`.
        heads: Attribute with the number of pieces that stay together, if each piece has q, k and v
            of one head.
        shared: Attribute with the number of query heads per key/value head, such as
            `num_key_value_groups`. If tp is a multiple of the key/value heads, several ranks
            compute each head, and the attribute shrinks on each rank.
        parts: Matrices packed side by side in the output features, each split separately. A number
            means equal sizes (q, k and v: 3). A tuple has the size of each in units, as a number or
            an attribute.
        gather_output: If True, all ranks receive all features, and tp need not divide them.

    Example:
        >>> rules = {
        ...     "attention.qkv": parallel3d.Column(parts=3),
        ...     "attention.out": "row",
        ...     "head": parallel3d.Column(gather_output=True),
        ... }
    """

    unit: str | None = None
    heads: str | None = None
    shared: str | None = None
    parts: int | tuple[int | str, ...] = 1
    gather_output: bool = False


@dataclass(frozen=True)
class Row:
    """Style of a linear layer with split input features.

    Its input is the output of a column-parallel layer. Its output is summed over tp, and its bias
    is added once.

    Args:
        sequence: If True, the output is split along the sequence.

    Example:
        >>> rules = {"blocks.*.up": parallel3d.Column(), "blocks.*.down": parallel3d.Row()}
        >>> parallel3d.tensor_parallelize(model, tp, rules, example=x)
    """

    sequence: bool = False


@dataclass(frozen=True)
class Vocab:
    """Style of an embedding with split rows. tp need not divide their number.

    A subclass may scale the result of `super().forward`.

    Example:
        >>> rules = {"embed": parallel3d.Vocab(), "head": parallel3d.Column(gather_output=True)}
        >>> parallel3d.tensor_parallelize(model, tp, rules, example=ids)
    """


@dataclass(frozen=True)
class SplitExperts:
    """Style of the experts of a mixture of experts in Hugging Face Transformers 5.

    The module has parameters [experts, ...]. Its forward pass takes tokens, and the expert indices
    and routing weights of each token. Each rank keeps some of the experts, and the outputs are
    summed over tp.

    Example:
        >>> experts = {"**.layers.*.mlp.experts": parallel3d.SplitExperts()}
        >>> parallel3d.tensor_parallelize(model, tp, {**parallel3d.rules_of(model), **experts})
    """


@dataclass(frozen=True)
class Replicate:
    """Style of a module that is replicated on every rank.

    Modules without a rule are replicated too, but linear layers and embeddings need this explicit
    style.

    Args:
        partial_gradient: If True, the module works on activations that are split over tp, such as a
            norm of each head. Its gradients are then summed over tp.
        gather_sequence: If True, the module works on a part of the sequence, and its output is
            all-gathered.

    Example:
        >>> router = {"blocks.*.router": parallel3d.Replicate()}
        >>> norms = {"blocks.*.q_norm": parallel3d.Replicate(partial_gradient=True)}
    """

    partial_gradient: bool = False
    gather_sequence: bool = False


@dataclass(frozen=True)
class Enter:
    """Style of a module whose input is read only by column-parallel layers inside it.

    The gradient of the input is then reduced over tp once, instead of once per layer.

    Args:
        argument: Name of the input if it is passed by keyword. A positional input is the first.
        sequence: If True, the input is split along the sequence and all-gathered.

    Example:
        >>> rules = {
        ...     "blocks.*.mlp": parallel3d.Enter("x"),
        ...     "blocks.*.mlp.gate": "column",
        ...     "blocks.*.mlp.up": "column",
        ...     "blocks.*.mlp.down": "row",
        ... }
    """

    argument: str = "hidden_states"
    sequence: bool = False


@dataclass(frozen=True)
class Scatter:
    """Style of the module where sequence parallelism begins.

    The module takes its part of a replicated input [batch, seq, ...] along the sequence. Everything
    that no rule splits stays replicated, including positions and masks.

    Args:
        argument: Name of the input if it is passed by keyword. A positional input is the first.

    Example:
        >>> rules = {
        ...     "blocks.0": parallel3d.Scatter("x"),
        ...     "blocks.*.mlp": parallel3d.Enter("x", sequence=True),
        ...     "blocks.*.mlp.up": "column",
        ...     "blocks.*.mlp.down": parallel3d.Row(sequence=True),
        ...     "blocks.*.norm": parallel3d.Replicate(partial_gradient=True),
        ...     "norm": parallel3d.Replicate(partial_gradient=True, gather_sequence=True),
        ... }
    """

    argument: str = "hidden_states"


@dataclass(frozen=True)
class Divide:
    """Style of a module whose forward pass reads local counts, such as its number of heads.

    Each count is divided by tp.

    Args:
        attributes: Names of the counts. `config.count` is set in a copy of the config that only
            this module has.
        shared: The attributes that count shared key/value heads. If tp is a multiple of such a
            count, each rank keeps one.

    Example:
        >>> rules = {
        ...     "blocks.*.attention": parallel3d.Divide(("n_head", "n_embd")),
        ...     "blocks.*.attention.qkv": parallel3d.Column(parts=3),
        ...     "blocks.*.attention.out": "row",
        ... }
    """

    attributes: tuple[str, ...]
    shared: tuple[str, ...] = ()


Style = Column | Row | Vocab | SplitExperts | Replicate | Enter | Scatter | Divide
Word = Literal["column", "row", "vocab", "replicate"]
Rules = Mapping[str, Style | Word]


def names_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns the module names that a pattern matches."""
    expression = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*", r"[^.]+")
    return [name for name in names if re.fullmatch(expression, name)]


WORDS: dict[Word, Style] = {
    "column": Column(),
    "row": Row(),
    "vocab": Vocab(),
    "replicate": Replicate(),
}
