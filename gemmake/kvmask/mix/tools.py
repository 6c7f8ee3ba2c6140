"""JSON and tool calls: assistants that call functions, records, settings, messages of devices.

Roles are those that every chat template has, so a tool's result comes as a user message.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemmake.kvmask.grammar import Words, expand, say, topics
from gemmake.kvmask.mix.chat import TOPICS, Turn, conversation, subjects, words_of
from gemmake.kvmask.window import Draft

Json = Mapping[str, object]

QUANTITIES = (
    *("temperature °C 18 96", "pressure bar 1 9", "level m 1 6", "current A 2 40"),
    *("speed rpm 300 2900", "humidity % 20 95", "flow l/min 5 220", "charge % 10 100"),
)
SETTINGS = (
    "limit",
    "interval_s",
    "target",
    "delay_s",
    "brightness",
    "speed",
    "volume",
    "timeout_s",
)
TEXTS = (
    "[no|lost] connection", "value out of range", "filter full", "door open", "battery low",
    "[motor|drive] too hot", "no answer for {20-90} s", "wrong [version|checksum|address]",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A function call in a conversation: what was asked, the call, its result, the answer."""

    asked: str
    arguments: Json
    result: object
    answer: str


@dataclass(frozen=True)
class Tool:
    """A function that the assistant may call: its parameters, and how a call of it comes about."""

    name: str
    what: str
    parameters: Mapping[str, str]  # name: type
    call: Callable[[random.Random, Words], Call]

    def schema(self) -> Json:
        """Its description, as assistants get it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"name": self.name, "description": self.what, "parameters": parameters}


def device(rng: random.Random) -> str:
    """The name of a device."""
    kind = rng.choice(("pump", "agv", "meter", "gateway", "robot", "fan", "oven", "lift", "tank"))
    return f"{kind}-{rng.randint(2, 89)}"


def moment(rng: random.Random) -> str:
    """A point in time."""
    day, minute = rng.randint(1, 28), rng.randint(0, 59)
    return f"2025-{rng.randint(1, 12):02d}-{day:02d}T{rng.randint(5, 22):02d}:{minute:02d}:00Z"


def reading(rng: random.Random) -> tuple[str, str, float]:
    """A quantity, its unit and a value."""
    name, unit, low, high = rng.choice(QUANTITIES).split()
    return name, unit, rng.randint(int(low) * 10, int(high) * 10) / 10


def _get_reading(rng: random.Random, words: Words) -> Call:
    name, (quantity, unit, value), at = device(rng), reading(rng), moment(rng)
    asked = f"[Tell me|Please read|I need] the {quantity} of {name}[| right now| for {{person}}]."
    result = {"device": name, "quantity": quantity, "value": value, "unit": unit, "taken_at": at}
    answer = f"The {quantity} of {name} [is|was] {value} {unit}, [measured|read] at {at[11:16]}."
    return Call(
        say(rng, asked, words),
        {"device": name, "quantity": quantity},
        result,
        say(rng, answer, words),
    )


def _set_value(rng: random.Random, words: Words) -> Call:
    name, setting, new = device(rng), rng.choice(SETTINGS), rng.randint(5, 240)
    old = new + rng.choice((-4, -2, -1, 3, 5, 10, 20))
    asked = f"[Set|Change|Please set] {setting} of {name} to {new}[|, {{person}} asked for it]."
    answer = f"Done: {setting} of {name} is {new} now; before it was {old}."
    arguments = {"device": name, "setting": setting, "value": new}
    return Call(say(rng, asked, words), arguments, {"ok": True, "old": old, "new": new}, answer)


def _list_alarms(rng: random.Random, words: Words) -> Call:
    area, level = f"hall {rng.randint(2, 19)}", rng.choice(("warning", "error", "notice"))
    found = [
        {
            "id": rng.randint(1000, 9999),
            "device": device(rng),
            "text": expand(rng, rng.choice(TEXTS), words),
        }
        for _ in range(rng.randint(2, 5))
    ]
    lines = [f"- {one['id']} {one['device']}: {one['text']}" for one in found]
    asked = say(rng, f"[Show|List] all alarms of level {level} in {area}[| since {{day}}].", words)
    head = f"There are {len(found)} alarms of level {level} in {area}:"
    return Call(asked, {"area": area, "level": level}, found, "\n".join([head, *lines]))


def _create_ticket(rng: random.Random, words: Words) -> Call:
    name, text = device(rng), expand(rng, rng.choice(TEXTS), words)
    person, number = words["person"][0], rng.randint(10_000, 99_999)
    urgency = rng.choice(("low", "normal", "high"))
    asked = f"[Open|Write|Make] a ticket for {person}: {name}, {text}. [Urgency|It is] {urgency}."
    arguments = {"title": f"{name}: {text}", "assignee": person, "urgency": urgency}
    answer = f'Ticket {number}, "{name}: {text}", is with {person} now.'
    return Call(say(rng, asked, words), arguments, {"ticket": number, "assignee": person}, answer)


def _find_part(rng: random.Random, words: Words) -> Call:
    part = expand(rng, "[seal|belt|fuse|bearing|filter|nozzle|spring] {A}{100-989}", PART_WORDS)
    shelf = f"{rng.choice('ABCDEFGH')}{rng.randint(1, 40)}"
    stock, price = rng.randint(0, 60), rng.randint(90, 9900) / 100
    asked = f"[Do we have|Is there still|How many are left of] {part}?"
    result = {"part": part, "shelf": shelf, "stock": stock, "price_eur": price}
    answer = f"{part}: {stock} [pieces|in stock] on shelf {shelf}, {price:.2f} euros each."
    return Call(say(rng, asked, words), {"part": part}, result, say(rng, answer, words))


PART_WORDS: Words = {"A": tuple("ABCDEFGHKLMNPRSTVX")}


def _book_room(rng: random.Random, words: Words) -> Call:
    room, date = f"{rng.randint(1, 9)}.{rng.randint(10, 49)}", moment(rng)[:10]
    start, people, code = f"{rng.randint(8, 17)}:30", rng.randint(3, 24), rng.randint(100, 999)
    asked = f"[Book|Reserve|I need] room {room} on {date} at {start} for {people} people."
    arguments = {"room": room, "date": date, "start": start, "people": people}
    answer = f"Room {room} is yours on {date} at {start}; the door code is {code}."
    return Call(say(rng, asked, words), arguments, {"booked": True, "door_code": code}, answer)


def _forecast(rng: random.Random, words: Words) -> Call:
    town, day = rng.choice(words["town"]), rng.choice(words["day"])
    low, rain, wind = rng.randint(-4, 14), rng.randint(0, 24), rng.randint(2, 70)
    result = {"town": town, "low_c": low, "high_c": low + 9, "rain_mm": rain, "wind_kmh": wind}
    asked = f"[How will the weather be|What is the forecast] in {town} on {day}?"
    wet = f"{rain} mm of rain" if rain else "no rain"
    answer = f"In {town} on {day}: {low} to {low + 9} °C, {wet}, wind up to {wind} km/h."
    return Call(say(rng, asked, words), {"town": town, "day": day}, result, answer)


def _route(rng: random.Random, words: Words) -> Call:
    name, start = f"agv-{rng.randint(2, 89)}", f"gate {rng.randint(2, 14)}"
    goal = f"rack {rng.randint(2, 60)}"
    via = [f"lane {number}" for number in rng.sample(range(1, 30), rng.randint(2, 4))]
    length, seconds = rng.randint(40, 400), rng.randint(50, 600)
    asked = f"[Send|Drive|Move] {name} from {start} to {goal}[|, please|, as soon as it is free]."
    result = {"accepted": True, "via": via, "length_m": length, "eta_s": seconds}
    answer = f"{name} drives to {goal} by way of {', '.join(via)}: {length} m, {seconds} s."
    arguments = {"vehicle": name, "start": start, "goal": goal}
    return Call(say(rng, asked, words), arguments, result, answer)


def _notes(rng: random.Random, words: Words) -> Call:
    name = rng.choice(subjects())
    topic, own = topics(TOPICS)[name], words_of(rng, TOPICS, name)
    texts = [say(rng, text, own) for text in rng.sample(topic.sentences, rng.randint(2, 3))]
    found = [{"page": rng.randint(1, 240), "text": text} for text in texts]
    asked = f"[What do the notes say|Look into the notes] about {name}[|, please]."
    answer = " ".join(f"Page {one['page']}: {one['text']}" for one in found)
    return Call(say(rng, asked, words), {"query": name, "limit": len(found)}, found, answer)


TOOLS = (
    Tool(
        "get_reading",
        "Reads a value of a device",
        {"device": "string", "quantity": "string"},
        _get_reading,
    ),
    Tool(
        "set_value",
        "Changes a setting of a device",
        {"device": "string", "setting": "string", "value": "number"},
        _set_value,
    ),
    Tool("list_alarms", "Alarms of an area", {"area": "string", "level": "string"}, _list_alarms),
    Tool(
        "create_ticket",
        "Writes a ticket for somebody",
        {"title": "string", "assignee": "string", "urgency": "string"},
        _create_ticket,
    ),
    Tool("find_part", "Stock and place of a spare part", {"part": "string"}, _find_part),
    Tool(
        "book_room",
        "Books a meeting room",
        {"room": "string", "date": "string", "start": "string", "people": "integer"},
        _book_room,
    ),
    Tool("forecast", "Weather of a town", {"town": "string", "day": "string"}, _forecast),
    Tool(
        "route",
        "Sends a vehicle to a place",
        {"vehicle": "string", "start": "string", "goal": "string"},
        _route,
    ),
    Tool("search_notes", "Searches the notes", {"query": "string", "limit": "integer"}, _notes),
)


def dumped(value: object, indent: int | None = None) -> str:
    """A value as JSON, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def tool_turns(rng: random.Random, tools: list[Tool], words: Words) -> Iterator[Turn]:
    """Requests, calls, results, answers, and now and then a look back."""
    before: list[Call] = []
    while True:
        tool = rng.choice(tools)
        call = tool.call(rng, words)
        made = dumped({"name": tool.name, "arguments": call.arguments})
        yield call.asked, made, f"Result: {dumped(call.result)}", call.answer
        if before and rng.random() < 0.3:
            old = rng.choice(before)
            yield f'I had asked: "{old.asked}" What was the answer?', old.answer
        before.append(call)


def calls(rng: random.Random, chars: int) -> Draft:
    """A conversation with functions."""
    words = words_of(rng, TOPICS, rng.choice(subjects()))
    tools = rng.sample(TOOLS, 2 if chars < 1200 else 4)
    listed = "\n".join(dumped(tool.schema()) for tool in tools)
    intro = rng.choice(
        (
            f"{words['person'][0]}'s assistant. Call one of these functions with one line of JSON:",
            f"You work for {words['person'][0]} and may call these functions, in JSON:",
            f"Functions ({words['person'][0]} has approved them). Reply with JSON to call one:",
        )
    )
    turns = tool_turns(rng, tools, words)
    return Draft(messages=conversation(turns, chars, f"{intro}\n{listed}"))


def settings(rng: random.Random, chars: int) -> Json:
    """The settings of a device, as long as wanted: named parts with their own settings."""
    parts: dict[str, object] = {}
    out: dict[str, object] = {"device": device(rng), "version": rng.randint(1, 40), "parts": parts}
    while len(parts) < 2 or len(dumped(out, 2)) < chars - 150:
        name = f"{rng.choice(('input', 'output', 'axis', 'zone', 'port'))}_{rng.randint(1, 99)}"
        quantity, unit, value = reading(rng)
        part: dict[str, object] = {"quantity": quantity, "unit": unit, "limit": value}
        for key in rng.sample(SETTINGS[1:], rng.randint(1, 3)):
            part[key] = rng.randint(1, 300)
        if rng.random() < 0.5:
            part["enabled"] = rng.random() < 0.8
        parts[name] = part
    return out


def setting_turns(rng: random.Random, chars: int) -> Iterator[Turn]:
    """Settings that are shown, then questions about single ones and changes."""
    found = settings(rng, chars * 3 // 5)
    parts = found["parts"]
    assert isinstance(parts, dict)
    count = f"{found['device']} has {len(parts)} parts: {', '.join(parts)}."
    yield f"Settings of {found['device']}:\n{dumped(found, 2)}\nWhich parts are there?", count
    while True:
        name = rng.choice(list(parts))
        key = rng.choice(list(parts[name]))
        value = parts[name][key]
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
            parts[name] = {**parts[name], key: value + rng.randint(1, 50)}
            change = f"Set {key} of {name} to {parts[name][key]} and show that part."
            yield change, dumped({name: parts[name]}, 2)
        elif rng.random() < 0.3:
            yield f"Show the part {name}.", dumped({name: parts[name]}, 2)
        else:
            yield f"What is {key} of {name}?", f"{key} of {name} is {dumped(value)}."


def messages_log(rng: random.Random, chars: int) -> str:
    """Messages of a few devices, one JSON object a line, in order of time."""
    devices = [(device(rng), reading(rng)) for _ in range(rng.randint(2, 5))]
    second, lines = rng.randint(20_000, 60_000), [f"# messages of {devices[0][0]} and others"]
    while sum(map(len, lines)) + len(lines) < chars or len(lines) < 3:
        second += rng.randint(1, 90)
        name, (quantity, unit, value) = rng.choice(devices)
        at = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        line: dict[str, object] = {"at": at, "from": name}
        if rng.random() < 0.8:
            line |= {quantity: round(value + rng.randint(-9, 9) / 10, 1), "unit": unit}
        else:
            line |= {"event": expand(rng, rng.choice(TEXTS), {}), "level": rng.randint(1, 4)}
        lines.append(dumped(line))
    return "\n".join(lines)


def extraction(rng: random.Random, chars: int) -> str:
    """Sentences and what they say as JSON, again and again in the same form."""
    words = words_of(rng, TOPICS, "warehouse")
    keys = rng.sample(("who", "device", "quantity", "value", "unit", "at", "where"), 5)
    out = [f"Find {', '.join(keys)} in each text and write JSON."]
    while sum(map(len, out)) < chars - 100 or len(out) < 3:
        name, who = device(rng), rng.choice(words["first"])
        (quantity, unit, value), at = reading(rng), moment(rng)[11:16]
        where = f"hall {rng.randint(2, 30)}"
        text = rng.choice(
            (
                f"At {at} {who} read {value} {unit} of {quantity} from {name} in {where}.",
                f"{who} called from {where}: the {quantity} of {name} was {value} {unit} at {at}.",
                f"{name} in {where} showed a {quantity} of {value} {unit} when {who} came at {at}.",
            )
        )
        known = {
            "who": who, "device": name, "quantity": quantity, "value": value, "unit": unit,
            "at": at, "where": where,
        }  # fmt: skip
        out.append(f"Text: {text}\nJSON: {dumped({key: known[key] for key in keys})}")
    return "\n\n".join(out)


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Text `number` of this kind: every second one a conversation with functions."""
    form = number % 8
    if form % 2 == 0:
        return calls(rng, chars)
    if form == 1:
        return Draft(text=dumped(settings(rng, chars), 2))
    if form == 3:
        return Draft(text=extraction(rng, chars))
    if form == 5:
        return Draft(text=messages_log(rng, chars))
    return Draft(messages=conversation(setting_turns(rng, chars), chars))
