"""Timelines of schedules, simulated or recorded, drawn as text, SVG or trace."""
