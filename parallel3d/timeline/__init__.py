"""A schedule in time: simulated or recorded, and drawn as text, as SVG or as a trace."""
