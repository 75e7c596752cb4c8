"""From files to batches: source -> corpus -> order -> loader. The loader alone imports torch."""
