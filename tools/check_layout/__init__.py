"""`parallel3d-check-layout`: the proof that a layout trains the model of one process."""
