"""Output of a run: metrics, progress display, dashboards and profiles."""
