"""`parallel3d-plan calibrate`: measures this machine and writes a hardware file for the planner."""
