"""Renders chat templates in a process of their own, with nothing to reach and little to spend.

A template comes with a checkpoint and is program text, so it runs in Jinja's immutable sandbox, in
a child process with limits on time, memory and output. Whatever goes wrong there is a reason in
words, never an exception of the compiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 10  # for all conversations together; a real template needs a few milliseconds
MEMORY_BYTES = 1 << 30
OUTPUT_CHARS = 1 << 18  # of one conversation
TEMPLATE_CHARS = 1 << 18

Message = Mapping[str, str]  # role, content


@dataclass(frozen=True)
class Conversation:
    """Messages, and whether the text ends where the assistant is to answer."""

    messages: tuple[Message, ...]
    prompt: bool


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, or why there is none."""

    text: str = ""
    error: str = ""


def render(
    template: str, variables: Mapping[str, str], conversations: Sequence[Conversation]
) -> list[Rendered]:
    """Renders all conversations in one child process; one result each, in order."""
    if len(template) > TEMPLATE_CHARS:
        return [Rendered(error=f"{len(template)} characters, too long")] * len(conversations)
    job = {
        "template": template,
        "variables": dict(variables),
        "conversations": [
            {"messages": [dict(m) for m in c.messages], "prompt": c.prompt} for c in conversations
        ],
    }
    # -I keeps the environment and the working directory out; the child gets this path instead.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from gemmake.sandbox import worker; "
        "worker(sys.stdin.buffer, sys.stdout.buffer)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", code],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Rendered(error=f"not finished after {SECONDS} s")] * len(conversations)
    try:
        answers = json.loads(done.stdout)
        return [Rendered(**answer) for answer in answers]
    except (ValueError, TypeError):
        reason = f"the renderer stopped with code {done.returncode}, out of time or memory"
        return [Rendered(error=reason)] * len(conversations)


def limit_resources() -> None:
    """Caps this process: memory, processor time, no new files. POSIX only; a no-op elsewhere."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def environment() -> Any:
    """The sandbox with the few extras that checkpoint templates count on."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # marks what the assistant said; the text stays as it is
        tags = {"generation"}  # noqa: RUF012  the base class declares it this way

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.globals["raise_exception"] = raise_exception
    env.filters["tojson"] = tojson
    return env


def render_one(template: Any, variables: Mapping[str, str], job: Mapping[str, Any]) -> Rendered:
    """One conversation, inside the child."""
    try:
        parts, size = [], 0
        for part in template.generate(
            messages=job["messages"],
            add_generation_prompt=job["prompt"],
            tools=None,
            documents=None,
            **variables,
        ):
            size += len(part)
            if size > OUTPUT_CHARS:
                return Rendered(error=f"over {OUTPUT_CHARS} characters of output")
            parts.append(part)
        return Rendered(text="".join(parts))
    except Exception as error:  # a template may raise anything
        return Rendered(error=f"{type(error).__name__}: {error}"[:200])


def worker(source: Any, sink: Any) -> None:
    """The child: reads the job, writes the results."""
    job = json.loads(source.read())
    env = environment()
    limit_resources()
    try:
        template = env.from_string(job["template"])
        results = [render_one(template, job["variables"], c) for c in job["conversations"]]
    except Exception as error:  # the template may be anything
        reason = Rendered(error=f"{type(error).__name__}: {error}"[:200])
        results = [reason] * len(job["conversations"])
    sink.write(json.dumps([{"text": r.text, "error": r.error} for r in results]).encode())
