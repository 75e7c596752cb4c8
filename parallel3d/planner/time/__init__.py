"""Step time: operators on a roofline, collectives by latency and bandwidth, and the pipeline
schedule."""
