"""What ails a server: ranked causes with their evidence, from a metrics page, a load test or the text of an error.

The knowledge is in :mod:`kvlab.operate.causes` (what numbers show) and :mod:`kvlab.operate.error_texts` (what messages
say); this module asks every rule and puts the answers in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.errors import MeasureError
from kvlab.operate.causes import CAUSES, Cause, cause
from kvlab.operate.error_texts import Said, said
from kvlab.operate.facts import Facts

NOTHING_IS_WRONG = "nothing is wrong"
_UNKNOWN = (
    "The cause stands above the last traceback: look for the first line that ends in Error, and give the log from "
    "there."
)


@dataclass(frozen=True)
class Finding:
    """One cause that was found.

    Args:
        cause: its id.
        title: in a sentence.
        strength: part of the requests' time, or of the requests, that is lost to it, 0 to 1.
        evidence: what shows it.
        check: what to look at next.
        remedy: what to do.
        flags: of ``vllm serve`` that the remedy sets.
        chapter: of the book that explains it.
    """

    cause: str
    title: str
    strength: float
    evidence: tuple[str, ...]
    check: str
    remedy: str
    flags: tuple[str, ...]
    chapter: str


@dataclass(frozen=True)
class Diagnosis:
    """Every cause that was found, the most likely first.

    Args:
        causes: empty where none was found.
        sources: what was read.
        notes: what is odd about it, and what it cannot tell.
        without_cause: the verdict where none was found.
    """

    causes: tuple[Finding, ...]
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    without_cause: str = NOTHING_IS_WRONG

    @property
    def first(self) -> str | None:
        """The id of the first cause; None where none was found."""
        return self.causes[0].cause if self.causes else None

    @property
    def verdict(self) -> str:
        """In a sentence."""
        return self.causes[0].title if self.causes else self.without_cause

    def report(self) -> dict[str, Any]:
        """As one JSON object."""
        return {"kind": "kvlab-diagnosis", "version": 1, "verdict": self.verdict} | asdict(self)


def diagnose(facts: Facts) -> Diagnosis:
    """Ask every rule.

    A rank is the strength, but a cause that makes another is named before it.

    Args:
        facts: from :func:`~kvlab.operate.facts.facts` or :func:`~kvlab.operate.client.facts_of_loadtest`.
    """
    spoken = list(_by_messages(facts))
    found = {finding.cause: finding for finding in spoken}
    for each in CAUSES:
        seen = each.when(facts) if each.when else None
        if seen and (each.id not in found or seen.strength > found[each.id].strength):
            found[each.id] = _finding(each, seen.strength, seen.evidence)
    # Failures that say why are named by what they say, and not once more as failures.
    told = sum(finding.strength for finding in spoken if finding.cause != "server-errors") * (facts.attempts or 0.0)
    if told and told >= 0.8 * sum(facts.failures.values()):
        found.pop("server-errors", None)
    return Diagnosis(tuple(_ranked(found.values())), facts.sources, facts.notes)


def diagnose_error(text: str) -> Diagnosis:
    """What the text of an error says: of a start that failed, of a crash, or of an answer.

    Args:
        text: the message, or a whole log with it; the causes come in the order of the table.

    Raises:
        MeasureError: the text is empty.
    """
    if not text.strip():
        raise MeasureError("the text of the error is empty; give the message, or the log from its first traceback on")
    found = tuple(_spoken(each, 1.0) for each in said(text))
    notes = () if found else (_UNKNOWN,)
    return Diagnosis(found, ("the text of an error",), notes, without_cause="no message in this text is known here")


def _by_messages(facts: Facts) -> Iterator[Finding]:
    """What the messages of failed requests say, each as strong as it is frequent."""
    counts: dict[str, int] = {}
    spoken: dict[str, Said] = {}
    for text, count in facts.failure_texts.items():
        for each in said(text)[:1]:
            counts[each.cause] = counts.get(each.cause, 0) + count
            spoken.setdefault(each.cause, each)
    for id, count in counts.items():
        finding = _spoken(spoken[id], min(count / (facts.attempts or count), 1.0))
        yield Finding(**{**vars(finding), "evidence": (*finding.evidence, f"{count:,} requests failed with it")})


def _finding(of: Cause, strength: float, evidence: tuple[str, ...], remedy: str = "") -> Finding:
    return Finding(of.id, of.title, strength, evidence, of.check, remedy or of.remedy, of.flags, of.chapter)


def _spoken(each: Said, strength: float) -> Finding:
    return _finding(cause(each.cause), strength, (each.evidence,), each.remedy)


def _ranked(found: Iterable[Finding]) -> Iterator[Finding]:
    """The strongest first among those that nobody who is still to be named makes."""
    left = sorted(found, key=lambda finding: -finding.strength)
    while left:
        made = {other for finding in left for other in cause(finding.cause).makes}
        following = next((finding for finding in left if finding.cause not in made), left[0])
        left.remove(following)
        yield following
