"""`parallel3d-plan calibrate`: measures this host for the planner."""
