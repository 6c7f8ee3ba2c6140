"""What comes in and what may go out: the order of the dispatcher, the command to the vehicle.

Both are checked here, at the edge; inside everything is typed and frozen.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PAYLOAD_MOST = 2048  # bytes of an order
ANSWER_MOST = 512  # characters of a model's answer
SPEED_MOST = 150  # cm/s

Action = Literal["stop", "slow", "drive", "charge"]


class Order(BaseModel):
    """One order with the vehicle's state as the dispatcher sees it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
    # No control characters and no quotes: a goal cannot write lines of the prompt.
    goal: Annotated[str, Field(pattern=r"^[A-Za-z0-9 .,;:()/-]{1,60}$")]
    battery_percent: Annotated[int, Field(ge=0, le=100)]
    obstacle_cm: Annotated[int, Field(ge=0, le=99_999)] | None  # null: the scanner sees none
    expires_at: Annotated[float, Field(gt=0)] | None = None  # seconds since 1970


class Command(BaseModel):
    """What the vehicle is to do; the model answers with this as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    action: Action
    speed_cm_s: Annotated[int, Field(ge=0, le=SPEED_MOST)]


COMMAND_SCHEMA: dict[str, Any] = Command.model_json_schema()


class UnreadableError(Exception):
    """A payload that is no order, or an answer that is no command. Text: what is wrong."""

    def __init__(self, why: Literal["unreadable", "no_json", "schema"], text: str) -> None:
        super().__init__(text)
        self.why = why


def _first(error: ValidationError) -> tuple[str, str]:
    """(kind, sentence) of the first fault; never the value itself."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    return fault["type"], f"{place}: {fault['msg']}" if place else fault["msg"]


def read_order(payload: bytes) -> Order:
    """The order of an MQTT payload. Raises UnreadableError("unreadable")."""
    if len(payload) > PAYLOAD_MOST:
        reason = f"{len(payload)} bytes; an order has at most {PAYLOAD_MOST}"
        raise UnreadableError("unreadable", reason)
    try:
        return Order.model_validate_json(payload)
    except ValidationError as error:
        raise UnreadableError("unreadable", _first(error)[1]) from None


def read_command(answer: str) -> Command:
    """The command of a model's answer. Raises UnreadableError: no_json or schema."""
    if len(answer) > ANSWER_MOST:
        raise UnreadableError("no_json", f"{len(answer)} characters; at most {ANSWER_MOST}")
    try:
        return Command.model_validate_json(answer)
    except ValidationError as error:
        kind, sentence = _first(error)
        readable = kind not in ("json_invalid", "string_unicode")
        raise UnreadableError("schema" if readable else "no_json", sentence) from None
