"""Estimates the peak memory of each pipeline rank, by kind."""
