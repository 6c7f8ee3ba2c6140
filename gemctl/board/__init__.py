"""The machine: sensors, power, clocks, and the throttle that acts on them."""
