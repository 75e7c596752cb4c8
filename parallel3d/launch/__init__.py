"""Starts the workers of a run, connects them, reports failures, and manages the run folder."""
