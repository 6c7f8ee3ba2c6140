"""The prompt: three examples, then the state. Short, because reading it is half of the time.

Small models follow the last example most, so the careful one stands there.
"""

from __future__ import annotations

from order import Order

HEAD = """\
Command for each state of a vehicle, as JSON:
bring box 12 to dock 1, free way, battery 80 % -> {"action":"drive","speed_cm_s":120}
return to aisle 3, free way, battery 9 % -> {"action":"charge","speed_cm_s":30}
fetch crate 2, obstacle at 250 cm, battery 70 % -> {"action":"slow","speed_cm_s":30}
"""
STOP = "\n"  # a command is one line
ANSWER_TOKENS = 24  # the longest command takes 17 of SmolLM2's


def prompt(order: Order) -> str:
    """The text that the model goes on from."""
    seen = "free way" if order.obstacle_cm is None else f"obstacle at {order.obstacle_cm} cm"
    return f"{HEAD}{order.goal}, {seen}, battery {order.battery_percent} % ->"
