"""How a module is split over tp: a table of name patterns, each with a style, for
`convert.apply.tensor_parallelize`.

A pattern is a module's name with `*` for any one part of it and `**` for any number of parts, none
included: `model.layers.*.mlp.up_proj`, `**.mlp.up_proj`. A style is one of the classes below, or a
word: "column", "row", "vocab", "replicate". `convert.families` has the tables of transformers'
families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A linear layer whose output features are split; what follows works on this rank's.

    `unit` names an attribute of the parent module: how many features stay together (`head_dim`:
    whole heads). `heads` names one that counts the pieces that stay together, whatever they hold
    (q, k and v of each head in turn). `shared` names one that counts the heads that read one of
    these (`num_key_value_groups`): where tp is a multiple of the heads, each is computed by several
    ranks from a weight that all keep, and that count shrinks on each. `parts` is for several
    products that lie side by side in the output features, each of which is split by itself: so many
    of equal size (q, k and v: 3), or the size of each in units, a number or the name of an
    attribute that has it. A name may have dots (`config.num_attention_heads`). Of an embedding, the
    columns are split.

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
    gather_output: bool = False  # give every rank all features; tp need not divide them then


@dataclass(frozen=True)
class Row:
    """A linear layer whose input features are split, as a column-parallel layer left them; its
    output is summed over tp, and its bias added once. `sequence`: each rank gets its part of the
    sequence of that sum.

    Example:
        >>> rules = {"blocks.*.up": parallel3d.Column(), "blocks.*.down": parallel3d.Row()}
        >>> parallel3d.tensor_parallelize(model, tp, rules, example=x)
    """

    sequence: bool = False


@dataclass(frozen=True)
class Vocab:
    """An embedding whose rows are split; tp need not divide them. A subclass may scale what
    `super().forward` gives.

    Example:
        >>> rules = {"embed": parallel3d.Vocab(), "head": parallel3d.Column(gather_output=True)}
        >>> parallel3d.tensor_parallelize(model, tp, rules, example=ids)
    """


@dataclass(frozen=True)
class SplitExperts:
    """The experts of a mixture as transformers 5 has them: parameters [experts, ...], and a forward
    that is given the tokens, the experts of each and their weights, or, as Llama 4's, the tokens of
    one expert after the other. Each rank has some of the experts; what they give is summed, or
    joined.

    Example:
        >>> experts = {"**.layers.*.mlp.experts": parallel3d.SplitExperts()}
        >>> parallel3d.tensor_parallelize(model, tp, {**parallel3d.rules_of(model), **experts})
    """


@dataclass(frozen=True)
class Replicate:
    """A module that every rank has whole: what all modules without a rule are, but a linear or an
    embedding wants to be told. `partial_gradient`: it works on activations that are split over tp
    (a norm of each head), so its gradient is a sum over tp.

    Example:
        >>> router = {"blocks.*.router": parallel3d.Replicate()}
        >>> norms = {"blocks.*.q_norm": parallel3d.Replicate(partial_gradient=True)}
    """

    partial_gradient: bool = False
    # its input and its own work are a part of the sequence, its output is the whole
    gather_sequence: bool = False


@dataclass(frozen=True)
class Enter:
    """A module inside which column-parallel layers alone read its input (the first argument, or the
    keyword `argument`): the input's gradient is then summed over tp once, on the way out, and not
    in each of those layers. `sequence`: the input is a part of the sequence, which is gathered.

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
    """A module that takes its part of the sequence [batch, seq, ...] of an input that is whole:
    with it sequence parallelism begins. What is not split along the sequence by a rule is whole,
    positions and masks too.

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
    """A module whose forward reads these attributes of its own, counts of what is split: each is
    divided by tp. Of those of `shared` heads a rank keeps one where tp is a multiple of them. An
    attribute `config.count` is set in a copy of the config, which this module alone has.

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
    """Returns the names of modules that a pattern matches."""
    expression = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*", r"[^.]+")
    return [name for name in names if re.fullmatch(expression, name)]


WORDS: dict[Word, Style] = {
    "column": Column(),
    "row": Row(),
    "vocab": Vocab(),
    "replicate": Replicate(),
}
