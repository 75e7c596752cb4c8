"""What a run tells the outside of its steps: metrics, the line or bar on a terminal, dashboards and
profiles."""
