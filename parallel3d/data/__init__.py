"""Turns files into batches: source -> corpus -> order -> loader. Only the loader imports torch."""
