"""Training loop, trainer and the components that run between steps."""
