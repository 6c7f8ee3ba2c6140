"""Answers as text for people: tables, one line an event, units with every number."""

from __future__ import annotations

import json
import time

TYPE_CHECKING = False  # see session.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXIT_CODES = (
    "Exit: 0 done, 2 not understood, 3 no daemon, 4 refused, 5 memory, 6 not found, "
    "7 forbidden, 8 failed, 9 busy or too late, 10 not in this state, 11 no room in the store, "
    "130 stopped."
)
# Units of the series of `stats --history`.
UNITS = {
    "temp_c": "C", "predicted_c": "C", "threshold_c": "C", "throttle_level": "level",
    "duty": "of 1", "throughput_tps": "tokens/s", "tokens": "tokens", "power_w": "W",
    "queued": "requests",
}  # fmt: skip
BLOCKS_MOST = 60  # of a line of the history
BLOCKS = "▁▂▃▄▅▆▇█"
# Why a command of the broker was refused (MQTT.md).
REFUSED = (
    "retained", "garbage", "oversize", "unknown", "expired", "no_id", "id_reused", "reply_gone",
    "reply_topic", "forbidden", "busy", "signature", "subscription",
)  # fmt: skip
UNKNOWN = "-"


def number(value: Any, unit: str = "", digits: int = 1) -> str:
    """A figure with its unit; a dash where it is not known."""
    if value is None:
        return UNKNOWN
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".rstrip()


def mib(size: int | None) -> str:
    """Bytes in MiB; the few that are less than one in KiB."""
    if not size:
        return UNKNOWN
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.0f} KiB"


def seconds(count: float) -> str:
    """A time in its two largest units."""
    whole = int(count)
    for size, unit, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {below}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def refusals(counts: dict[str, int]) -> str:
    """Which of the broker's commands were refused, and how often; nothing where none was."""
    found = [f"{word} {counts[word]}" for word in REFUSED if counts.get(word)]
    return f"; refused: {', '.join(found)}" if found else ""


def table(rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def info(found: dict[str, Any]) -> str:
    """gemctl info."""
    mqtt = found["mqtt"]
    written = found["state_bytes_written"]
    rows = [
        ["gemctld", f"{found['version']}, process {found['pid']}, up {seconds(found['uptime_s'])}"],
        ["configuration", found["config"] or "none; the defaults hold"],
        ["socket", found["socket"]],
        ["state", f"{found['state']}; {mib(written) if written else 'nothing'} written to it"],
        ["memory", mib(found["rss_bytes"])],
        ["machine", f"{found['machine']}, Python {found['python']}"],
        ["throttle", f"{found['tick_ms']:.1f} ms for a look at the sensors"],
        ["MQTT", "off" if mqtt is None else ("connected" if mqtt["connected"] else mqtt["reason"])
         + refusals(mqtt.get("commands") or {})],
        ["attached", ", ".join(found["attached"]) or "no program"],
    ]  # fmt: skip
    return table(rows)


def sparkline(values: list[float | None], least: float, most: float) -> str:
    """One block a value; a blank where it is not known."""
    span = max(most - least, 1e-9)

    def block(value: float | None) -> str:
        if value is None:
            return " "
        share = min(1.0, max(0.0, (value - least) / span))
        return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]

    return "".join(block(value) for value in values)


def auto_reset(found: dict[str, Any]) -> str:
    """When the KV cache is emptied, of every model and whoever asks."""
    percent = found.get("kv_auto_reset_percent")
    if percent is None:
        return "auto-reset off"
    full = f"an answer that leaves it {percent} % full" if percent else "every answer"
    return f"auto-reset on, after {full}"


def stats(found: dict[str, Any], whose: str = ", of all models") -> str:
    """gemctl stats. `whose` the requests are."""
    t, r = found["throttle"], found["requests"]
    p50, p95 = found["ttft_p50_ms"], found["ttft_p95_ms"]
    rows = [
        ["model", f"{found['model']} ({found['state']})" if found["model"]
         else "none is active; gemctl model list, or model replace FILE"],
        ["version", (found["digest"] or UNKNOWN)[:12]],
        ["first token", f"{number(found['ttft_ms'], 'ms')}; 5 minutes: median {number(p50, 'ms')}, "
         f"95 % {number(p95, 'ms')}"],
        ["throughput", number(found["throughput_tps"], "tokens/s")],
        ["KV cache", f"{found['kv_cache_used']} of {number(found['kv_cache_size'])} tokens; "
         f"{auto_reset(found)}"],
        ["temperature", f"{number(found['temp_c'], 'C')}; in 30 s "
         f"{number(t['predicted_c'], 'C')}, threshold {number(t['threshold_c'], 'C')}"],
        ["throttle", f"{t['mode']}, level {t['level']}, duty {t['duty'] * 100:.0f} %; "
         f"{t['reason']}"],
        ["power", f"{number(found['power_w'], 'W')}; "
         f"{number(found['energy_per_token_j'], 'J a token', 3)}"],
        ["requests", f"{r['active']} active, {r['queued']} queued, {r['done']} done, "
         f"{r['failed']} failed{whose}"],
    ]  # fmt: skip
    return table(rows)


def blocks_of(values: list[float | None], width: int) -> list[float | None]:
    """Means of so many values each, the newest whole."""
    cut = [values[max(0, end - width) : end] for end in range(len(values), 0, -width)]
    known = [[value for value in part if value is not None] for part in reversed(cut)]
    return [sum(part) / len(part) if part else None for part in known]


def threads(count: float | None) -> str:
    """How many."""
    return f"{number(count)} thread{'' if count == 1 else 's'}"


def blocks(found: dict[str, Any], width: int = 1) -> str:
    """What a block of a history's line is, of so many of its values."""
    return f"means of {found['step_s'] * width} s, newest right"


def history(found: dict[str, Any]) -> str:
    """gemctl stats --history: a line a series."""
    count = max((len(values) for values in found["series"].values()), default=1)
    width = max(1, -(-count // BLOCKS_MOST))
    rows = [["series", "unit", "least", "most", "newest", blocks(found, width)]]
    for name, values in found["series"].items():
        known = [value for value in values if value is not None]
        if known:
            line = sparkline(blocks_of(values, width), min(known), max(known))
            figures = [number(value) for value in (min(known), max(known), known[-1])]
            rows.append([name, UNITS.get(name, ""), *figures, line])
    return table(rows) if len(rows) > 1 else "nothing yet; try again in a minute"


def plain(value: Any) -> str:
    """A field of an event: words as they are, what is nested as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def event(found: dict[str, Any]) -> str:
    """One line."""
    when = time.strftime("%H:%M:%S", time.localtime(found["ts"]))
    rest = {key: value for key, value in found.items() if key not in ("seq", "ts", "kind")}
    fields = " ".join(f"{key}={plain(value)}" for key, value in rest.items())
    return f"{found['seq']:>6} {when} {found['kind']:<18} {fields}"


def doctor(found: dict[str, Any]) -> str:
    """A mark, a name and a sentence each."""
    marks = {"ok": "✓", "warn": "⚠", "bad": "✗"}
    checks = found["checks"]
    lines = [f"{marks[check['level']]} {check['name']}: {check['text']}" for check in checks]
    bad = sum(check["level"] == "bad" for check in checks)
    warn = sum(check["level"] == "warn" for check in checks)
    return "\n".join([*lines, f"{len(checks)} checks, {warn} warnings, {bad} bad"])


def models(found: dict[str, Any]) -> str:
    """gemctl model list."""
    if not found["models"]:
        return "no model yet; gemctl model replace FILE.gembin"
    rows = [["", "name", "state", "version", "memory", "versions", "priority", ""]]
    for m in found["models"]:
        notes = ["attached program" if m.get("attached") else "pinned" if m["pinned"] else ""]
        notes += [f"on probation, {left(m)}"] if m.get("probation_left_s") is not None else []
        notes += [job(m["job"])] if m.get("job") else []
        note = ", ".join(note for note in notes if note)
        mark = "*" if m["active"] else ""
        digest = (m["digest"] or UNKNOWN)[:12]
        row = [mark, m["name"], m["state"], digest, mib(m["memory_bytes"]), str(m["versions"])]
        rows.append([*row, str(m["priority"]), note])
    return table(rows) + "\n* answers when no model is named"


def left(found: dict[str, Any]) -> str:
    """What is left of a probation: whichever of the two comes first ends it."""
    if found.get("not_kept"):
        return "passed, not kept yet"
    time_left, answers = found.get("probation_left_s"), found.get("probation_left_requests")
    if time_left is None:
        return "about to end"
    more = f", or {answers} more answer{'s' if answers != 1 else ''}" if answers else ""
    return f"{seconds(time_left)} left{more}"


def probation(found: dict[str, Any]) -> str:
    """While gemctl model replace --wait waits."""
    return f"  {'probation':<10} {left(found)}"


def passed(found: dict[str, Any]) -> str:
    """gemctl model replace --wait, at its end."""
    return f"{found['name']} {(found['digest'] or UNKNOWN)[:12]}: passed its probation"


def mark(status: dict[str, Any], digest: str) -> str:
    """What a stored version is to its model."""
    current, before = status["current"], status["previous"]
    if status.get("on_probation"):
        back = before if current == status["digest"] else current
        words = {back: "serves again if the probation fails", status["digest"]: "on probation"}
        return words.get(digest, "")
    if status.get("attached") and current != status["digest"]:  # a program with a file of its own
        return "the newest good one, not in use" if digest == current else ""
    return {before: "previous", current: "current"}.get(digest, "")


def job(found: dict[str, Any]) -> str:
    """What changes a model now, and how far it is."""
    step = f", {found['step']}" if found["step"] else ""
    size = f" {mib(found['bytes_done'])} of {mib(found['bytes'])}" if found["bytes"] else ""
    return f"{found['what']}{step}{size}, for {seconds(found['seconds'])}"


def cancelled(found: dict[str, Any]) -> str:
    """gemctl model cancel."""
    return f"{found['model']}: {found['what']} cancelled"


def version_in_use(found: dict[str, Any]) -> str:
    """The beginning of its digest; an attached program may have a file that the store has not."""
    if found.get("attached") and found["digest"] is None:
        return "its own file"
    return (found["digest"] or UNKNOWN)[:12]


def model(found: dict[str, Any]) -> str:
    """gemctl model status."""
    w, r = found["worker"] or {}, found["requests"]
    rows = [
        ["name", found["name"] + (" (active)" if found["active"] else "")
         + (" (attached program)" if found.get("attached") else "")],
        ["state", found["state"] + (f", {found['busy']}" if found["busy"] else "")],
        ["version", version_in_use(found)
         + (f", on probation: {left(found)}" if found["on_probation"] else "")],
        ["memory", mib(found["memory_bytes"])
         + (f", {mib(w['locked_bytes'])} of it locked" if w.get("locked_bytes") else "")],
        ["worker", f"pid {w['pid']}, {threads(w['threads'])}, {w['kernel']}, engine {w['version']}"
         if w else UNKNOWN],
        ["context", (f"{w['kv_size']} tokens" if w else UNKNOWN) + f"; {auto_reset(found)}"],
        ["requests", f"{r['done']} done, {r['failed']} failed, {found['queued']} waiting"],
        ["crashes", str(found["crashes"])],
    ]  # fmt: skip
    if found.get("job"):
        how = "gemctl model cancel ends it" if found["job"]["can_cancel"] else "runs to its end"
        rows.insert(2, ["under way", f"{job(found['job'])}; {how}"])
    for version in found["present"]:
        row = f"{version['digest'][:12]} {mib(version['bytes'])} {mark(found, version['digest'])}"
        rows.append(["stored", row.rstrip()])
    if found.get("not_kept"):
        rows.append(["not kept", f"until the disk takes it, it ends with the daemon: "
                     f"{found['not_kept']}"])  # fmt: skip
    for bad in found["bad"]:
        rows.append(["bad", f"{bad['digest'][:12]} {bad['reason']}"])
    return table(rows)


def done(what: str) -> Callable[[dict[str, Any]], str]:
    """A verb that has been carried out."""

    def text(found: dict[str, Any]) -> str:
        took = f" in {found['ms']:.0f} ms" if "ms" in found else ""
        return f"{found['model']}: {what}{took}"

    return text


def cleared(found: dict[str, Any]) -> str:
    """gemctl model clear."""
    name = found["model"]
    more = f"; gemctl model load {name}" if found.get("state") == "empty" else ""
    return f"{name}: cleared{more}"


def disabled(found: dict[str, Any]) -> str:
    """gemctl model --disable."""
    freed = f", {mib(found['freed_bytes'])} freed" if found.get("freed_bytes") else ""
    took = f" in {found['ms']:.0f} ms" if "ms" in found else ""
    how = f"gemctl model enable {found['model']}"
    return f"{found['model']}: disabled{took}{freed}; {how} loads it again"


def switched(found: dict[str, Any]) -> str:
    """gemctl switch-model."""
    how = "was loaded already" if found["resident"] else "was loaded"
    return f"{found['model']}: answers now ({how}); {found['ms']:.0f} ms"


def phase(found: dict[str, Any]) -> str:
    """A phase of a replacement."""
    more = ""
    if found.get("tests") is not None:
        more = f", {found['tests']} test vectors passed"
    elif found.get("signature"):
        others = [one for one in found.get("warnings") or () if one != found["signature"]]
        more = f", {'; '.join([found['signature'], *others])}"
    elif found.get("bytes"):
        more = f", {mib(found['bytes'])}"
    elif found.get("warnings"):
        more = f", {'; '.join(found['warnings'])}"
    return f"  {found['phase']:<10} {found['ms']:>9.1f} ms{more}"


def replaced(found: dict[str, Any]) -> str:
    """gemctl model --replace."""
    who = f"{found.get('model', '')} {(found['digest'] or UNKNOWN)[:12]}".strip()
    if found.get("already"):
        return f"{who}: serves already; nothing was changed"
    how = ", serial: the old one ended first" if found["strategy"] == "serial" else ""
    gap = found.get("max_token_gap_ms")
    gap_text = "" if gap is None else f", {gap:.1f} ms without a token at most"
    return (
        f"{who}: answers now{how}; exchanged in {found['flip_ms']:.1f} ms after "
        f"{found['total_ms'] / 1e3:.2f} s{gap_text}; on probation, see gemctl model status"
    )


def rolled_back(found: dict[str, Any]) -> str:
    """gemctl model rollback."""
    who = f"{found['model']} {(found.get('digest') or 'its own file')[:12]}"
    left = (
        f"; not kept until the disk takes it: {found['not_kept']}" if found.get("not_kept") else ""
    )
    return f"{who}: the version before answers now{left}"


def bundled(found: dict[str, Any]) -> str:
    """gemctl bundle."""
    return f"wrote {found['path']}; look through it before you send it"


def throttle(found: dict[str, Any]) -> str:
    """gemctl throttle."""
    cap = f"{found['cap'] * 100:.0f} % of the clock" if found["cap"] else "none"
    if found["cap"] and found.get("cap_power") is not None:
        known = "of this board" if found["volts"] == "description" else "as assumed"
        cap += f", {found['cap_power'] * 100:.0f} % of the dynamic power (volts {known})"
    rows = [
        ["mode", found["mode"]],
        ["threshold", number(found["threshold_c"], "C")
         + (f"; {found['threshold_note']}" if found.get("threshold_note") else "")],
        ["temperature", f"{number(found['temp_c'], 'C')}, predicted "
         f"{number(found['predicted_c'], 'C')}"],
        ["level", f"{found['level']} ({found['rung']}); {found['reason']}"],
        ["duty", f"{found['duty'] * 100:.0f} % of the time, {threads(found['threads'])}"],
        ["clock cap", cap + ("" if found["powerd"] else " (gemctl-powerd is absent)")],
        ["external", ", ".join(found["external"]) or "none"],
    ]  # fmt: skip
    rows += [["fault", f"{name}: {why}"] for name, why in found["faults"]]
    if found.get("not_kept"):
        rows.append(["not kept", f"until the disk takes it, it ends with the daemon: "
                     f"{found['not_kept']}"])  # fmt: skip
    if found["until"]:
        rows.append(["until", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["until"]))])
    return table(rows)


def calibrating(found: dict[str, Any]) -> str:
    """A second of the step test."""
    return f"{found['left_s']:>4} s left, {found['temp_c']:.1f} C, {found['power_w']:.1f} W"


def calibrated(found: dict[str, Any]) -> str:
    """For the configuration file."""
    return (
        f"rtheta_c_per_w = {found['rtheta_c_per_w']:.2f}\ntau_s = {found['tau_s']:.0f}\n"
        "put both below [throttle] in the configuration, then gemctl config reload"
    )


def checked(found: dict[str, Any]) -> str:
    """gemctl config check."""
    return f"{found['path']}: good"


def reloaded(found: dict[str, Any]) -> str:
    """gemctl config reload."""
    rest = ", ".join(found["restart_needed"])
    return "reloaded" + (f"; needs a restart: {rest}" if rest else "")


def staged(found: dict[str, Any]) -> str:
    """gemctl model stage."""
    digest = found["digest"]
    return (
        f"{digest}\nin the store, the file is not needed any more; let it answer: "
        f"gemctl model replace --name {found['model']} --digest {digest[:12]}"
    )


def devices(found: dict[str, Any]) -> str:
    """gemctl fleet status."""
    if not found["devices"]:
        return "no device there; check --site and --group"
    rows = [["device", "", "model", "version", "state", "throttle"]]
    for d in found["devices"]:
        online = "online" if d["online"] else "offline"
        level = UNKNOWN if d["throttle_level"] is None else f"level {d['throttle_level']}"
        digest = (d["digest"] or UNKNOWN)[:12]
        state = d["state"] or UNKNOWN
        rows.append([d["device"], online, d["model"] or UNKNOWN, digest, state, level])
    return table(rows)
