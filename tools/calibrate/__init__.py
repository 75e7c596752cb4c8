"""`parallel3d-plan calibrate`: measures this machine and writes the hardware file that the planner
reads."""
