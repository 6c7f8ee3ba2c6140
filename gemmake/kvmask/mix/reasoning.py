"""Reasoning traces: problems, the steps that solve them one by one, a check, and the answer.

Every figure is computed here, so that the steps are right and later ones follow from earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemmake.kvmask.grammar import Words, bind, expand, say, topics
from gemmake.kvmask.mix.chat import TOPICS, Turn, conversation, numbered, system_prompt
from gemmake.kvmask.window import Draft

THINGS = (
    *("boxes", "screws", "bottles", "bricks", "cables", "lamps", "chairs", "tiles", "books"),
    *("apples", "pipes", "batteries", "bags of sand", "filters", "envelopes", "plants", "tickets"),
)
SINGLE = (
    *("box", "lamp", "chair", "filter", "cable", "ladder", "tent", "battery", "helmet", "fan"),
    *("drill", "kettle", "blanket", "shelf", "bucket", "rope", "clock", "printer", "radio", "pump"),
)
ELECTRIC = (
    *("lamp", "fan", "drill", "kettle", "printer", "radio", "pump", "heater", "oven", "camera"),
    *("compressor", "mixer", "saw", "server", "freezer", "lift", "projector", "charger"),
)
JOBS = (
    *("drilling", "washing", "painting", "drying", "packing", "testing", "welding", "cutting"),
    *("cooling", "printing", "sorting", "gluing", "loading", "grinding", "labelling", "heating"),
)


@dataclass(frozen=True)
class Problem:
    """A question, the steps to its answer, and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: str


def euros(cents: int) -> str:
    """Cents as euros."""
    return f"{cents // 100}.{cents % 100:02d} euros"


def clock(minutes: int) -> str:
    """Minutes since midnight as a time of day."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def plural(count: int, word: str) -> str:
    """A count with its word; the word is given for one."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def stock(rng: random.Random, words: Words, size: int) -> Problem:
    """Things that come and go; how many are left."""
    thing, who, count = rng.choice(THINGS), words["person"][0], rng.randint(40, 400)
    words = {**words, "thing": (thing,)}
    told, steps = [f"{who} has {count} {thing}."], [f"At the start there are {count} {thing}."]
    for _ in range(size):
        number, kind = rng.randint(5, 39), rng.choice(("in", "out", "packs"))
        packs = rng.randint(2, 9)
        change = {"in": number, "out": -number, "packs": packs * 6}[kind]
        if count + change < 0:
            kind, change = "in", number
        told.append(say(rng, STOCK[kind], {**words, "n": (str(number),), "p": (str(packs),)}))
        sign, text = ("+", "more") if change > 0 else ("-", "fewer")
        extra = f"{packs} packs of 6 are {packs * 6}. " if kind == "packs" else ""
        steps.append(
            f"{extra}{abs(change)} {text}: {count} {sign} {abs(change)} = {count + change}."
        )
        count += change
    asked = rng.choice((f"How many {thing} are there in the end?", f"How many {thing} are left?"))
    return Problem(" ".join([*told, asked]), tuple(steps), f"{count} {thing}.")


STOCK = {
    "in": "[{other} brings|On {day} {other} delivers|Then come] {n} more [of them|{thing}].",
    "out": "[{n} are sold to {town}|{other} takes {n} away|{n} break and are thrown away].",
    "packs": "[{p} packs of 6 arrive|{other} adds {p} packs of 6|{p} packs of 6 are found].",
}


def bill(rng: random.Random, words: Words, size: int) -> Problem:
    """A bill with several lines, a discount and the delivery."""
    lines, steps, total = [], [], 0
    for item in rng.sample(SINGLE, size):
        count, price = rng.randint(2, 19), rng.randint(3, 180) * 25
        lines.append(f"{count} x {item} at {euros(price)}")
        step = f"{item}: {count} x {euros(price)} = {euros(count * price)}; "
        total += count * price
        steps.append(f"{step}the sum is {euros(total)} now.")
    percent, delivery = rng.choice((4, 8, 12, 20)), rng.randint(4, 30) * 100
    off = total * percent // 100
    steps += [
        f"The discount of {percent} percent: {euros(total)} x {percent} / 100 = {euros(off)}.",
        f"{euros(total)} - {euros(off)} = {euros(total - off)}.",
        f"With the delivery: {euros(total - off)} + {euros(delivery)} = "
        f"{euros(total - off + delivery)}.",
    ]
    question = (
        f"[{{person}} orders|An order from {{town}}|For {{town}} we need]: {'; '.join(lines)}. "
        f"[The dealer takes off|There is a discount of] {percent} percent, "
        f"and the delivery costs {euros(delivery)}. [What is the total|How much is it in all]?"
    )
    return Problem(say(rng, question, words), tuple(steps), f"{euros(total - off + delivery)}.")


def tank(rng: random.Random, words: Words, size: int) -> Problem:
    """A tank that is filled and emptied in phases."""
    level, capacity = rng.randint(5, 40) * 10, rng.randint(12, 40) * 100
    told = [f"[A tank|The tank at {{town}}] holds {capacity} litres; {level} litres are in it."]
    steps, phase = [f"Start: {level} litres."], rng.choice(("Phase", "Step", "Part"))
    for number in range(1, size + 1):
        into, out, minutes = rng.randint(8, 60), rng.randint(0, 30), rng.randint(3, 24)
        told.append(
            f"{phase} {number}: {minutes} minutes with {into} litres a minute in"
            + (f" and {out} out." if out else " and nothing out.")
        )
        net, new = into - out, min(capacity, max(0, level + (into - out) * minutes))
        steps.append(
            f"{into} - {out} = {net} litres a minute, times {minutes} is {net * minutes}; "
            f"{level} + {net * minutes} = {level + net * minutes}"
            + (f", but the limit is {new}." if new != level + net * minutes else ".")
        )
        level = new
    told.append("[How much is in it at the end|What is the level at the end]?")
    steps.append(f"Free at the end: {capacity} - {level} = {capacity - level} litres.")
    return Problem(say(rng, " ".join(told), words), tuple(steps), f"{level} litres.")


def schedule(rng: random.Random, words: Words, size: int) -> Problem:
    """Jobs on two machines that wait for each other."""
    jobs, start = rng.sample(JOBS, size), rng.randint(12, 20) * 30
    free, done = {"A": start, "B": start}, {"": start}
    free_at = f"two machines, A and B, that are free at {clock(start)}"
    told, steps = [f"[{{person}} has|In {{town}} there are|We have|Given are] {free_at}."], []
    for number, job in enumerate(jobs):
        machine, minutes = rng.choice("AB"), rng.randint(2, 15) * 5
        before = rng.choice(jobs[:number]) if number and rng.random() < 0.7 else ""
        told.append(
            f"{job.capitalize()} takes {minutes} minutes on {machine}"
            + (f" and needs {before} to be finished." if before else ".")
        )
        ready = done[before]
        begin = max(free[machine], ready)
        reason = f"{machine} is free at {clock(free[machine])}"
        if before:
            reason += f", {before} ends at {clock(ready)}, the later one is {clock(begin)}"
        done[job] = free[machine] = begin + minutes
        steps.append(f"{job.capitalize()}: {reason}. It ends at {clock(begin + minutes)}.")
    last = max(jobs, key=lambda job: done[job])
    told.append("[When is everything finished|When can {person} go home]? Keep to this order.")
    steps.append(f"The last one is {last}, at {clock(done[last])}.")
    return Problem(say(rng, " ".join(told), words), tuple(steps), f"At {clock(done[last])}.")


CAUSES = (
    "the fuse has blown|the lamp on the panel is dark",
    "the filter is blocked|the pressure before the filter is high",
    "the sensor is broken|the display shows the same value all the time",
    "the belt is torn|the motor turns but the wheel does not",
    "the cable is loose|the fault comes and goes when the door is moved",
    "the oil is too old|the oil is black and smells burnt",
    "the network is down|other devices do not answer either",
    "the settings were lost|the date on the display is wrong",
    "the bearing is worn|the housing is hot on one side",
    "the valve is stuck|the pipe behind it stays cold",
    "the battery is empty|it works when the charger is plugged in",
    "the air supply is closed|the gauge at the wall is at zero",
)


def fault(rng: random.Random, words: Words, size: int) -> Problem:
    """Possible causes, each with its sign; looking at the signs leaves one."""
    found = [cause.split("|") for cause in rng.sample(CAUSES, min(size + 1, len(CAUSES)))]
    true = rng.randrange(len(found))
    name = expand(rng, "[pump|fan|robot|mixer|conveyor|compressor] {2-90}", words)
    told = [
        f"{name[0].upper()}{name[1:]} does not run. {words['person'][0]} thinks of "
        f"{len(found)} causes.",
        *(f"If {cause}, then {sign}." for cause, sign in found),
        f"{words['other'][0]} looks at all of it: only this is the case, {found[true][1]}.",
        "What is the cause?",
    ]
    steps = []
    for number, (cause, sign) in enumerate(found):
        if number == true:
            steps.append(f"Could it be that {cause}? Then {sign}. That was seen, so it stays.")
        else:
            steps.append(
                f"[Could it be|Is it possible] that {cause}? Then {sign}, which [was not seen|is "
                "not so]. [Ruled out|Not this one|No]."
            )
    texts = tuple(say(rng, step, words) for step in steps)
    return Problem(" ".join(told), texts, f"{found[true][0][0].upper()}{found[true][0][1:]}.")


def energy(rng: random.Random, words: Words, size: int) -> Problem:
    """What devices cost in a month."""
    price = rng.randint(18, 42)
    told, steps, total = [f"One kilowatt hour costs {price} cents."], [], 0
    for item in rng.sample(ELECTRIC, size):
        watts, hours, days = rng.randint(2, 60) * 50, rng.randint(2, 12), rng.randint(4, 30)
        told.append(f"The {item} needs {watts} watts and runs {hours} hours on {days} days.")
        used = watts * hours * days
        total += used
        steps.append(f"The {item}: {watts} x {hours} x {days} = {used} watt hours, so far {total}.")
    cents = total * price // 1000
    steps += [
        f"{total} watt hours are {total // 1000}.{total % 1000:03d} kilowatt hours.",
        f"Times {price} cents that is {cents} cents.",
    ]
    told.append("[What do they cost together|How much is it for the month]?")
    return Problem(say(rng, " ".join(told), words), tuple(steps), f"{euros(cents)}.")


def moves(rng: random.Random, words: Words, size: int) -> Problem:
    """People who hand things on; who has which in the end."""
    people = rng.sample(words["first"], 4)
    things = rng.sample(SINGLE, 3)
    holder = {thing: rng.choice(people) for thing in things}
    told = [f"{who} has the {thing}." for thing, who in holder.items()]
    steps = ["At first: " + "; ".join(f"{thing}: {who}" for thing, who in holder.items()) + "."]
    for _ in range(size + 2):
        thing = rng.choice(things)
        to = rng.choice([one for one in people if one != holder[thing]])
        text = rng.choice(
            ("{0} gives the {1} to {2}.", "{2} takes the {1} from {0}.", "{0} lends {2} the {1}.")
        )
        told.append(text.format(holder[thing], thing, to))
        steps.append(f"The {thing} goes from {holder[thing]} to {to}.")
        holder[thing] = to
    asked = rng.choice(things)
    steps.append("Now: " + "; ".join(f"{thing}: {who}" for thing, who in holder.items()) + ".")
    question = " ".join([*told, f"Who has the {asked} [now|at the end]?"])
    return Problem(say(rng, question, words), tuple(steps), f"{holder[asked]} has the {asked}.")


def order(rng: random.Random, words: Words, size: int) -> Problem:
    """Comparisons in random order; the whole order follows."""
    more, most = rng.choice((("heavier", "heaviest"), ("older", "oldest"), ("longer", "longest")))
    names = rng.sample([f"the {item}" for item in SINGLE], min(size + 1, 7))
    facts = [f"{a} is {more} than {b}" for a, b in pairwise(names)]
    chain, steps = [names[0]], [f"Nothing is {more} than {names[0]}, so it comes first."]
    for name in names[1:]:
        steps.append(f"{chain[-1]} is {more} than {name}, so {name} comes next.".capitalize())
        chain.append(name)
    place = rng.randrange(1, len(names))
    told = ". ".join(fact.capitalize() for fact in rng.sample(facts, len(facts)))
    question = (
        f"{told}. [Which one is number {place + 1}, counted from the {most}|Which is number "
        f"{place + 1} if the {most} is number 1]?"
    )
    steps.append(f"The order is: {', '.join(chain)}.")
    return Problem(say(rng, question, words), tuple(steps), f"{names[place].capitalize()}.")


def route(rng: random.Random, words: Words, size: int) -> Problem:
    """Ways over several towns; the shortest one."""
    towns = rng.sample(words["town"], 5)
    start, goal, others = towns[0], towns[1], towns[2:]
    told, steps, best = [f"From {start} to {goal} there are several ways."], [], (10**9, "")
    for number in range(1, max(2, min(size, 5)) + 1):
        via = rng.sample(others, rng.randint(1, 2))
        legs = [rng.randint(4, 60) for _ in range(len(via) + 1)]
        told.append(
            f"Way {number} goes over {' and '.join(via)}: {' km, '.join(map(str, legs))} km."
        )
        steps.append(f"Way {number}: {' + '.join(map(str, legs))} = {sum(legs)} km.")
        best = min(best, (sum(legs), f"way {number}"))
        steps.append(f"The shortest so far is {best[1]} with {best[0]} km.")
    told.append(
        "[Which one is the shortest|Which way should {person} take to drive as little as possible]?"
    )
    return Problem(
        say(rng, " ".join(told), words), tuple(steps), f"{best[1].capitalize()}, {best[0]} km."
    )


def values(rng: random.Random, words: Words, size: int) -> Problem:
    """Readings: their mean and median."""
    found = [rng.randint(12, 98) for _ in range(2 * (size // 2) + 3)]
    ranked, total = sorted(found), 0
    steps = []
    for number, value in enumerate(found, 1):
        steps.append(f"Value {number}: {total} + {value} = {total + value}.")
        total += value
    whole, rest = divmod(total, len(found))
    steps += [
        f"{total} / {len(found)} is {whole}, and {rest} is left over.",
        f"In order: {', '.join(map(str, ranked))}.",
        f"The one in the middle is number {len(found) // 2 + 1}: {ranked[len(found) // 2]}.",
    ]
    listed = ", ".join(map(str, found))
    question = (
        f"[{{person}} measured|The readings of {{day}} are|Given are] {listed}. What are "
        "the mean (in whole numbers) and the median?"
    )
    return Problem(
        say(rng, question, words), tuple(steps), f"Mean {whole}, median {ranked[len(found) // 2]}."
    )


def trace(rng: random.Random, words: Words, size: int) -> Problem:
    """A loop that is followed by hand."""
    start, factor, plus, modulus = (
        rng.randint(*limits) for limits in ((2, 40), (2, 7), (1, 19), (50, 200))
    )
    x, steps = start, [f"Before the loop x is {start}."]
    for turn in range(1, size + 2):
        new = (x * factor + plus) % modulus
        product = f"{x} * {factor} + {plus} = {x * factor + plus}"
        steps.append(f"Round {turn}: {product}, modulo {modulus} is {new}.")
        x = new
    question = (
        f"A number x starts at {start}. [{size + 1} times|In {size + 1} rounds] x becomes "
        f"(x * {factor} + {plus}) modulo {modulus}. What is x [at the end|then]?"
    )
    return Problem(say(rng, question, words), tuple(steps), f"x is {x}.")


KINDS: Sequence[Callable[[random.Random, Words, int], Problem]] = (
    *(stock, schedule, fault, bill, moves, tank, energy, order, route, values, trace),
)


def shown(rng: random.Random, problem: Problem) -> str:
    """The solution as text: steps with numbers or in a row, then the answer."""
    end = rng.choice(("Answer", "So the answer is", "Result"))
    begin = rng.choice(
        (
            "Let us go step by step.",
            "Step by step:",
            "I work through it in order.",
            "First I write down what is known.",
        )
    )
    steps = problem.steps
    if rng.random() < 0.6:
        return f"{begin}\n{numbered(steps)}\n{end}: {problem.answer}"
    return f"{begin} {' '.join(steps)} {end}: {problem.answer}"


def problems(rng: random.Random, number: int, chars: int) -> Iterator[Problem]:
    """Problems without end, starting with another kind for every number."""
    common = topics(TOPICS)["common"]
    most = 4 if chars < 1200 else 8
    while True:
        words = bind(rng, common, common)
        yield KINDS[number % len(KINDS)](rng, words, rng.randint(2, most))
        number += rng.randint(1, len(KINDS) - 1)


def turns(rng: random.Random, number: int, chars: int) -> Iterator[Turn]:
    """Problems as questions and answers, now and then a look back."""
    before: list[Problem] = []
    for problem in problems(rng, number, chars):
        yield problem.question, shown(rng, problem)
        if before and rng.random() < 0.3:
            old = rng.choice(before)
            yield f'Before, I asked: "{old.question}" What was the result?', old.answer
        before.append(problem)


def sheet(rng: random.Random, number: int, chars: int) -> str:
    """Problems with solutions as a sheet."""
    title = rng.choice(("Sheet", "Exercises", "Worked examples", "Solutions"))
    out = [f"{title} {rng.randint(2, 99)} for class {rng.randint(4, 12)}"]
    for place, problem in enumerate(problems(rng, number, chars), 1):
        text = f"Problem {place}: {problem.question}\nSolution: {shown(rng, problem)}"
        if len(out) > 1 and sum(map(len, out)) + len(text) // 2 > chars:
            break
        out.append(text)
    return "\n\n".join(out)


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Trace `number` of the mix: two conversations, then a sheet."""
    if number % 3 == 2:
        return Draft(text=sheet(rng, number, chars))
    system = system_prompt(rng) if rng.random() < 0.3 else ""
    return Draft(messages=conversation(turns(rng, number, chars), chars, system))
