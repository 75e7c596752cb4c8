"""Tensor parallelism: the layers, their collectives and their parameters."""
