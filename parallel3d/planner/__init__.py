"""The planner: what a layout needs, how long its step takes, and which layout is best. No torch
here."""
