"""Pipeline parallelism: schedules as data, and the one runtime that carries them out."""
