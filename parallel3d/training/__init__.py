"""The training loop and what stands around it: the one place that knows the whole."""
