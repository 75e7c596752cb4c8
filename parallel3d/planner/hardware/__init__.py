"""Devices and links from hardware files, profiles of training frameworks, and calibrated
measurements."""
