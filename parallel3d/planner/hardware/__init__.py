"""Devices and links: their peaks from hardware files, what a training program adds, and what
`calibrate` measured."""
