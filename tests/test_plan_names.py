"""Names of models, hardware and engines: found as people write them, and never by a part of a
word."""

from __future__ import annotations

import pytest

from parallel3d.tools.aliases.lookup import Kind, find_name


@pytest.mark.parametrize(
    "said, kind, name",
    [
        ("p5.48xlarge", "hardware", "aws-p5"),
        ("NVIDIA H100 80GB HBM3", "hardware", "h100-80gb"),
        ("A100-SXM4-80GB", "hardware", "a100-80gb"),
        ("meta-llama/Llama-3.1-8B", "model", "llama3.1-8b"),
        ("google/gemma-2-9b-it", "model", "gemma2-9b"),
        ("meta-llama/Llama-2-7b-chat-hf", "model", "llama2-7b"),
        ("llama3-8bit", "model", None),
        ("Megatron", "framework", "megatron-core"),
        ("gh100", "hardware", None),
        ("xtuner (megatron-core)", "framework", None),
    ],
)
def test_names_are_found_as_people_write_them_and_as_a_whole(
    said: str, kind: Kind, name: str | None
) -> None:
    assert find_name(kind, said) == name
