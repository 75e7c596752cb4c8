"""Heartbeats of the ranks, and detection of a rank that hangs."""
