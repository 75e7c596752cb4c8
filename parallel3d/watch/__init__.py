"""Heartbeats of ranks, and detection of the rank that hangs."""
