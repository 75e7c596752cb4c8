"""A pipeline schedule in time: `parallel3d-plan timeline`."""
