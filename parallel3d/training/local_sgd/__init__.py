"""Replicas that train apart and are brought together every few steps: local SGD, DiLoCo and what
they send."""
