"""Tensor parallelism for existing models, and loading of pretrained weights."""
