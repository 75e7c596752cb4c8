"""How long a step takes: operators on a roofline, collectives by latency and bandwidth, and the
pipeline's schedule."""
