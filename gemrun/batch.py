"""Several sessions of one model, in one pass over its weights (csrc/gemrun_batch.h).

    with GemRunContext("model.gembin") as model, model.session() as other:
        batch = Batch()
        first = batch.join(model, model.tokenize("Hello", bos=True), max_tokens=32)
        second = batch.join(other, other.tokenize("Good morning", bos=True), max_tokens=32)
        batch.run()
        print(first.text, second.text)

Reading the weights is what a token costs: in a batch they are read once for all. An answer has the
same tokens as alone, whatever runs beside it and whenever others join or leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from gemrun import arguments
from gemrun._engine import ffi, lib
from gemrun.context import GemRunContext, _Call, _check
from gemrun.errors import BusyError, CallError, GemRunError, error_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Sampling(TypedDict, total=False):
    """How to sample; what is left out is the artifact's default. As of gemrun.context.Settings."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    banned: Iterable[int]
    bias: dict[int, float]
    ignore_stop_ids: bool


@dataclass(frozen=True)
class Item:
    """Next ids of a session. `more`: a part of a prompt, after which nobody wants logits."""

    session: GemRunContext
    ids: Sequence[int]
    more: bool = False


def room(session: GemRunContext) -> int:
    """Tokens of a pass that the session leads."""
    with _Call(session._handle) as pointer:
        return int(lib.gemrun_batch_room(pointer))


def append(items: Sequence[Item]) -> list[GemRunError | None]:
    """Append the ids of every item to its session, all in the same passes. Returns what kept an
    item out, or None where it did well; a refused session is as it was.

    A call waits until no other one is inside of any of the sessions.
    """
    sessions = [item.session for item in items]
    if not items or len({id(session) for session in sessions}) != len(items):
        what = "no session" if not items else "a session that is there twice"
        raise CallError(lib.GEMRUN_E_ARGUMENT, f"items: {what}; give each session once")
    c_items = ffi.new("gemrun_batch_item[]", len(items))
    ids = [ffi.new("int32_t[]", arguments.ids("ids", item.ids)) for item in items]
    with ExitStack() as inside:
        pointers = {
            id(handle): inside.enter_context(_Call(handle))
            for handle in sorted((s._handle for s in sessions), key=id)  # one order: no deadlock
        }
        for c_item, item, c_ids in zip(c_items, items, ids, strict=True):
            c_item.session = pointers[id(item.session._handle)]
            c_item.ids, c_item.count, c_item.more = c_ids, len(c_ids), item.more
        _check(lib.gemrun_batch_append(c_items, len(items)))
    return [_refusal(c_item, item) for c_item, item in zip(c_items, items, strict=True)]


_WORDS = {
    lib.GEMRUN_E_TOKEN: "an id that the model has not; give ids of its tokenizer",
    lib.GEMRUN_E_FULL: "no room for so many tokens; reset the session, or open it with more",
    lib.GEMRUN_E_ROOT: "of another artifact than the first one; open it as a session of that",
    lib.GEMRUN_E_NONFINITE: "a value is not finite; see gemcheck --run",
}


def _refusal(c_item: object, item: Item) -> GemRunError | None:
    status = int(c_item.status)  # type: ignore[attr-defined]
    if status == lib.GEMRUN_OK:
        return None
    words = _WORDS.get(status, "no ids; give one or more")
    return error_of(status, f"{item.session.info.name}: {words}")


@dataclass(eq=False)
class Answer:
    """A request in a batch; it grows with every step until it is done."""

    session: GemRunContext
    max_tokens: int
    sampling: Sampling
    on_token: Callable[[int], object] | None = None
    ids: list[int] = field(default_factory=list)
    finish_reason: str = "none"  # then one of gemrun.context.FINISH_REASONS
    error: GemRunError | None = None
    _next: list[int] = field(default_factory=list)  # ids that the session has not seen

    @property
    def done(self) -> bool:
        """Whether it has left the batch."""
        return self.finish_reason != "none"

    @property
    def text(self) -> str:
        """The text of its tokens."""
        return self.session.detokenize(self.ids)

    def _end(self, reason: str, error: GemRunError | None = None) -> None:
        self.finish_reason, self.error = reason, error

    def _take(self) -> None:
        """The next token, from the logits that a step has made."""
        token = self.session.sample(**self.sampling)
        info = self.session.info
        if not self.sampling.get("ignore_stop_ids", False) and token in info.stop_ids:
            self._end("stop_id")
            return
        self.ids.append(token)
        self._next = [token]
        stats = self.session.stats()
        if self.on_token is not None and self.on_token(token):
            self._end("callback")
        elif len(self.ids) >= self.max_tokens:
            self._end("max_tokens")
        elif stats.kv_used == stats.kv_size:
            self._end("context_full")


class Batch:
    """Requests that share their passes. They join and leave between two steps.

    One thread steps a batch. An answer's error is its own: the others go on.
    """

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def __len__(self) -> int:
        """How many are not done."""
        return len(self._answers)

    def join(
        self,
        session: GemRunContext,
        ids: Iterable[int],
        *,
        max_tokens: int = 256,
        on_token: Callable[[int], object] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Ask for an answer behind `ids`, which are appended to what the session holds: reset it
        for a new conversation. `on_token` sees every token; a true result ends the answer."""
        arguments.settings(sampling, Sampling.__annotations__)
        if any(answer.session is session for answer in self._answers):
            what = "is in the batch already; wait for its answer, or open another one"
            raise BusyError(lib.GEMRUN_E_BUSY, f"session: {what}")
        most = arguments.integer("max_tokens", max_tokens, 1, arguments.INT32_MAX)
        answer = Answer(session, most, sampling, on_token)
        answer._next = list(arguments.ids("ids", ids))
        self._answers.append(answer)
        return answer

    def leave(self, answer: Answer) -> None:
        """End an answer; what it has so far stays in it."""
        if answer in self._answers:
            answer._end("cancelled")
            self._answers.remove(answer)

    def step(self) -> list[Answer]:
        """One pass: a token of every answer, and the next piece of the prompts of new ones.
        Returns those that are done now."""
        if not self._answers:
            return []
        most = room(self._answers[0].session)
        parts = _share(self._answers[:most], most)
        items = [Item(a.session, a._next[:n], n < len(a._next)) for a, n in parts]
        for (answer, count), error in zip(parts, append(items), strict=True):
            answer._next = answer._next[count:]
            if error is not None:
                answer._end("error", error)
            elif not answer._next:
                answer._take()
        served = self._answers[:most]
        waiting = self._answers[most:]  # they come first in the next step
        self._answers = waiting + [answer for answer in served if not answer.done]
        return [answer for answer in served if answer.done]

    def run(self) -> None:
        """Step until all are done."""
        while self._answers:
            self.step()


def _share(answers: Sequence[Answer], most: int) -> list[tuple[Answer, int]]:
    """How many ids each gives to a pass of `most`: one each, and what is left to prompts in their
    order."""
    left = most - len(answers)
    parts = []
    for answer in answers:
        more = min(left, max(0, len(answer._next) - 1))
        left -= more
        parts.append((answer, 1 + more))
    return parts
