"""Finds the rank and parameter behind non-finite numbers or differing replicas."""
