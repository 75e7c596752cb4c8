"""`parallel3d-plan timeline`: simulates a pipeline schedule."""
