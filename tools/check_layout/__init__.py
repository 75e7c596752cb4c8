"""`parallel3d-check-layout`: checks that a layout trains the same model as one process."""
