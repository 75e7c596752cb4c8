"""Exports the model of a checkpoint to a Hugging Face folder: safetensors, config.json, tokenizer.

A single process writes one file at a time, for a checkpoint of any layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from parallel3d.checkpoint.hugging_face_names import HfTensor, hf_tensors
from parallel3d.checkpoint.manifest import Manifest, read_manifest, save_file
from parallel3d.checkpoint.pieces import read_box
from parallel3d.checkpoint.store import CONFIG_JSON, sync_folder
from parallel3d.config.hugging_face import (
    config_of,
    config_path,
    read_config_json,
    to_hugging_face,
)
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.data.corpus import find_tokenizer
from parallel3d.data.tokenizers import JsonTokenizer, Tokenizer
from parallel3d.errors import CheckpointError, ConfigError, DataError, writing

GENERATION_JSON = "generation_config.json"
# Files that Hugging Face reads in addition to tokenizer.json. Copied if they are next to it.
_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """Settings of an export.

    Args:
        model: Model config.
        seq_len: Sequence length of training.
        dtype: Dtype of the exported weights, such as "bfloat16". None keeps the saved dtypes.
        largest_file_bytes: Size limit of a safetensors file with several tensors.
        tokenizer_files: Content of each tokenizer file, keyed by name.
        end_of_text: ID that ends a document, or None if unknown.
        notes: Messages to the user.
    """

    model: ModelConfig
    seq_len: int
    dtype: str | None = None
    largest_file_bytes: int = 5 * 10**9
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    end_of_text: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> ExportForm:
        """Returns the settings for the model of a run, with the tokenizer of its first corpus.

        If the tokenizer cannot be read, leaves it out and says so in `notes`.
        """
        form = cls(model=recipe.model, seq_len=recipe.train.seq_len)
        try:
            tokenizer = find_tokenizer(recipe.data.corpora[0])
            files = _tokenizer_files(tokenizer)
        except (ConfigError, DataError, OSError) as error:
            return replace(form, notes=(f"exported without a tokenizer: {error}",))
        return replace(form, tokenizer_files=files, end_of_text=tokenizer.end_of_text)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the content of tokenizer.json and its companion files, keyed by file name.

    Creates a tokenizer_config.json if there is none. Returns {} for a byte tokenizer.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.library.id_to_token(tokenizer.end_of_text),
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer_config.json": json.dumps(config, indent=2).encode()}
    for path in map(tokenizer.path.with_name, _BESIDE_TOKENIZER):
        if path.is_file():
            files[path.name] = path.read_bytes()
    return files | {"tokenizer.json": tokenizer.path.read_bytes()}


@dataclass(frozen=True)
class ExportedTensor:
    """An exported tensor and the parameters in the checkpoint that it is made of."""

    source: HfTensor
    like: Tensor  # Meta tensor with the exported shape and dtype.


def export(checkpoint: Path, to: Path, form: ExportForm) -> Iterator[str]:
    """Exports a checkpoint to the folder `to`. Yields the name of each tensor that was read.

    Writes a temporary folder and renames it at the end, so exhaust the generator. With local SGD,
    exports the outer parameters.

    Raises ConfigError if no Hugging Face architecture fits the model, or if `to` exists or is
    inside the checkpoint; CheckpointError if the checkpoint is unreadable, of a different model, or
    overflows float16; and SaveError if the folder cannot be written.
    """
    if to.exists() or to.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(f"DIR = {to}: exists or is inside the checkpoint; choose another folder")
    manifest = read_manifest(checkpoint)
    tensors = _exported_tensors(checkpoint, manifest, form)
    files = _files(tensors, form.largest_file_bytes)
    parent = to.absolute().parent
    with writing(to):
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{to.name}.", suffix=".partial", dir=parent) as own:
            # A subfolder has normal permissions. TemporaryDirectory allows only the owner.
            partial = Path(own) / "model"
            partial.mkdir()
            for name, written in files.items():
                values: dict[str, Tensor] = {}
                for tensor in written:
                    values[tensor.source.name] = _read(checkpoint, manifest, tensor)
                    yield tensor.source.name
                save_tensors(values, partial / name, metadata={"format": "pt"})
            _write_others(partial, files, form)
            sync_folder(partial)
            partial.replace(to)


def _exported_tensors(
    checkpoint: Path, manifest: Manifest, form: ExportForm
) -> list[ExportedTensor]:
    """Returns all tensors of the exported model, in the order of `hf_tensors`.

    Raises CheckpointError if the parameters in the checkpoint are not exactly those needed.
    """
    saved = {name for name in manifest.tensors if name.startswith("model.")}
    sources = list(hf_tensors(form.model, sorted(name[len("model.") :] for name in saved)))
    needed = {f"model.{name}" for source in sources for name in source.parameters}
    for name in sorted(needed ^ saved):
        words = "unexpected" if name in saved else "missing"
        raise CheckpointError(
            f"{checkpoint}: {words} tensor {name}; the checkpoint does not match its config.yaml"
        )
    tensors = []
    for source in sources:
        first = manifest.tensors[f"model.{source.parameters[0]}"]
        dtype = getattr(torch, form.dtype or first.dtype)
        like = torch.empty(source.shape(first.shape), dtype=dtype, device="meta")
        tensors.append(ExportedTensor(source, like))
    return tensors


def _files(tensors: list[ExportedTensor], largest_bytes: int) -> dict[str, list[ExportedTensor]]:
    """Assigns tensors to files of at most `largest_bytes`. A larger tensor gets its own file."""
    files: list[list[ExportedTensor]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        if files[-1] and filled_bytes + tensor.like.nbytes > largest_bytes:
            files.append([])
            filled_bytes = 0
        files[-1].append(tensor)
        filled_bytes += tensor.like.nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{at:05}-of-{len(files):05}.safetensors": each for at, each in enumerate(files, 1)
    }


def _read(checkpoint: Path, manifest: Manifest, tensor: ExportedTensor) -> Tensor:
    """Reads the values of an exported tensor. Raises CheckpointError if float16 overflows."""
    made = torch.empty_like(tensor.like, device="cpu")
    parts = (made.t() if tensor.source.transposed else made).chunk(len(tensor.source.parameters))
    for name, part in zip(tensor.source.parameters, parts, strict=True):
        saved = manifest.tensors[f"model.{name}"]
        first = [tensor.source.rows(tensor.source.matrix(saved.shape)[0]).start]
        if part.ndim < len(saved.shape):  # A matrix, or a part of one, of a stack of matrices.
            part = part.unsqueeze(0)
            first = [*divmod(first[0], saved.shape[1])]
        read_box(checkpoint, saved, [*first, *[0] * (part.ndim - len(first))], part)
    if made.dtype == torch.float16 and not all(end.isfinite() for end in made.aminmax()):
        raise CheckpointError(
            f"{checkpoint}: {tensor.source.name} has values beyond float16; use --dtype bf16"
        )
    return made


def _write_others(folder: Path, files: dict[str, list[ExportedTensor]], form: ExportForm) -> None:
    """Writes config.json, generation_config.json, tokenizer files and, if needed, an index."""
    weights: dict[str, str] = {}
    total = 0
    for name, written in files.items():
        for tensor in written:
            weights[tensor.source.name] = name
            total += tensor.like.nbytes
    dtype = str(next(iter(files.values()))[0].like.dtype).removeprefix("torch.")
    eos = form.end_of_text
    generation: dict[str, Any] = {"eos_token_id": eos}
    if form.model.architecture == "transformers":
        config = config_of(form.model) | {"dtype": dtype, "torch_dtype": dtype}
        if eos is not None:
            config["eos_token_id"] = eos
        if "architectures" not in config:
            auto: Any = import_module("transformers.models.auto.modeling_auto")
            names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            config["architectures"] = [names[config["model_type"]]]
        generation_path = config_path(form.model).with_name(GENERATION_JSON)
        if generation_path.is_file():
            generation = read_config_json(generation_path)
    else:
        config = to_hugging_face(form.model, seq_len=form.seq_len, dtype=dtype, end_of_text=eos)
    trees: dict[str, Any] = {CONFIG_JSON: config, GENERATION_JSON: generation}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        trees["model.safetensors.index.json"] = index
    for name, tree in trees.items():
        save_file(folder / name, (json.dumps(tree, indent=2) + "\n").encode())
    for name, content in form.tokenizer_files.items():
        save_file(folder / name, content)
