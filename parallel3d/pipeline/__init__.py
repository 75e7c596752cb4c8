"""Pipeline parallelism: stages, transfers between ranks and the runtime for schedules."""
