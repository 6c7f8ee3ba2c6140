"""Decisions without input or output: clock and sensors are arguments."""
