"""Devices and links: their peaks from hardware files, what a training framework adds, and what
`calibrate` measured."""
