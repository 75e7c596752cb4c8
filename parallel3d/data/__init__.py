"""From files to batches: source -> corpus -> order -> loader. Only the loader imports torch."""
