"""How far a template's answers are from those of the cache that keeps everything, and what words
say about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gemmake.options import KvGate


@dataclass(frozen=True)
class Quality:
    """Against the cache that keeps everything."""

    kl: float
    top1: float
    perplexity: float  # relative rise; negative where it fell
    tokens: int  # looked at
    answers: int = 0  # tokens of answers among them: each asks for something far back
    right: int = 0  # of those the best next token ..
    right_dense: int = 0  # .. and that of the cache that keeps everything

    @property
    def forgotten(self) -> float:
        """By how much the share of right tokens of answers falls."""
        return (self.right_dense - self.right) / max(self.answers, 1)


def holds(gate: KvGate, found: Quality) -> bool:
    """Whether a template passes."""
    return (
        found.kl <= gate.kl
        and found.top1 >= gate.top1
        and found.perplexity <= gate.perplexity
        and found.forgotten <= gate.recall
    )


def words(found: Quality) -> str:
    """What a template costs."""
    said = (
        f"KL {found.kl:.5f}, equal best token {found.top1:.2%}, perplexity {found.perplexity:+.2%}"
    )
    if not found.answers:
        return said
    now, dense = (right / found.answers for right in (found.right, found.right_dense))
    return f"{said}, recall {now:.1%} (dense {dense:.1%}) of {found.answers} tokens"
