"""`parallel3d-checkpoint`: inspects, verifies, exports and imports checkpoints."""
