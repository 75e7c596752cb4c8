"""Simulation of a pipeline schedule: `parallel3d-plan timeline`."""
