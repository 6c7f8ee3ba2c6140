"""The prompt: what stays the same first, so that the engine has read it already; the state last."""

from __future__ import annotations

from order import Order

HEAD = """\
A vehicle gets one command as JSON for each state.
State: obstacle 60 cm, battery 80 %, order: bring box 9 to dock 4
Command: {"action":"stop","speed_cm_s":0}
State: obstacle none, battery 9 %, order: return to aisle 3
Command: {"action":"charge","speed_cm_s":30}
State: obstacle 250 cm, battery 70 %, order: fetch crate 2
Command: {"action":"slow","speed_cm_s":30}
State: obstacle none, battery 80 %, order: bring box 12 to dock 1
Command: {"action":"drive","speed_cm_s":120}
"""
STOP = "\n"  # a command is one line
ANSWER_TOKENS = 24  # the longest command takes 16 of SmolLM2's


def prompt(order: Order) -> str:
    """The text that the model goes on from."""
    seen = "none" if order.obstacle_cm is None else f"{order.obstacle_cm} cm"
    state = f"obstacle {seen}, battery {order.battery_percent} %, order: {order.goal}"
    return f"{HEAD}State: {state}\nCommand:"
