"""Claims: sentences that a cell proves each time it runs.

A claim that stops being true fails the build of the book; in a reader's own notebook it shows a cross and goes on.
"""

from __future__ import annotations

import hashlib
import html
import re
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.book.evidence import Missing, Verdict, equal, near, ordered
from kvlab.book.stage import in_build
from kvlab.errors import KvlabError

# Where an output keeps the claim for the ledger: in its metadata, which no page shows.
CLAIM_KEY = "kvlab_claim"
_MISSING = Missing()


class ClaimFailed(KvlabError, AssertionError):
    """A claim of the book no longer holds."""


@dataclass(frozen=True)
class Claim:
    """A sentence with its proof.

    Args:
        sentence: what is claimed, in words; single backticks mark code.
        holds: whether the measurement bears it out.
        measured: the measurement, in words.
        expected: what was asked of it, in words.
        slug: the claim's anchor on its page.
        narrow: it holds, but without the factor to spare: on another machine, or beside another program, it may fail.
    """

    sentence: str
    holds: bool
    measured: str
    expected: str
    slug: str
    narrow: bool = False

    def __str__(self) -> str:
        mark = "✓" if self.holds else "✗"
        return f"{mark} {self.sentence} (measured {self.measured}; expected {self.expected})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        """HTML for a notebook, text for a terminal; beside them, as metadata, the fields for the ledger."""
        return {"text/html": self.html(), "text/plain": str(self)}, {CLAIM_KEY: asdict(self)}

    def html(self) -> str:
        """The claim as a box. Colours come from the page: it reads on light and on dark ground."""
        kind, mark, colour = ("holds", "✓", "#009E73") if self.holds else ("fails", "✗", "#D55E00")
        proof = f"measured {html.escape(self.measured)} · expected {html.escape(self.expected)}"
        return (
            f'<div class="kvlab-claim kvlab-claim-{kind}" id="{self.slug}" '
            f'style="border-left:4px solid {colour};padding:.35em .9em;margin:.6em 0;color:inherit">'
            f'<b class="kvlab-mark" role="img" aria-label="claim {kind}">{mark}</b> {_with_code(self.sentence)}'
            f'<br><small class="kvlab-proof">{proof}</small></div>'
        )


def claim(
    sentence: str,
    measured: Any,
    expected: Any = _MISSING,
    tolerance: float | None = None,
    *,
    relative: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    spare: float = 1.0,
    unit: str = "",
) -> None:
    """State a sentence and prove it with what was just measured.

    Exactly equal: ``claim("The cache holds N + M - 1 entries", cache.length, 12)``.
    Nearly equal: ``claim("Cached equals recomputed", cached, full, 1e-12)``, or ``relative=0.05`` for 5 %.
    An order: ``claim("Prefill is faster per token", ratio, at_least=1, spare=2)`` says *faster*, and whoever writes it
    expects twice the bound, so that the sentence does not hang on the noise of one machine. The sentence fails with
    its bound; where it only lacks the room, the build names it. Both bounds together are a range.

    Args:
        sentence: what is claimed; unique on its page, and short: its anchor is made from it.
        measured: a number, array, tensor, string, bool or list, computed in the notebook, never typed in.
        expected: what it must equal.
        tolerance: how far it may be off, absolutely; for arrays in every element.
        relative: how far it may be off as a share of ``expected``.
        at_least: the lower bound of the sentence.
        at_most: the upper bound of the sentence.
        spare: the factor by which a bound should be kept; 2 for timings.
        unit: written behind the numbers.

    Raises:
        ClaimFailed: in the build of the book, when the sentence is not true.
        ValueError: the claim does not say what it expects.
    """
    result = judge(
        sentence,
        measured,
        expected,
        tolerance,
        relative=relative,
        at_least=at_least,
        at_most=at_most,
        spare=spare,
        unit=unit,
    )
    _present(result)
    if in_build() and not result.holds:
        raise ClaimFailed(f"claim fails: {result}")


def judge(
    sentence: str,
    measured: Any,
    expected: Any = _MISSING,
    tolerance: float | None = None,
    *,
    relative: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    spare: float = 1.0,
    unit: str = "",
) -> Claim:
    """The verdict on a claim, without showing it; takes what :func:`claim` takes.

    Raises:
        ValueError: the claim does not say what it expects.
    """
    bounded = at_least is not None or at_most is not None
    if bounded == (not isinstance(expected, Missing)):
        raise ValueError("a claim needs either expected or at_least / at_most, one of the two")
    if bounded:
        if tolerance is not None or relative is not None:
            raise ValueError("tolerance and relative go with expected; a bound takes spare")
        verdict = ordered(measured, at_least, at_most, spare, unit)
    elif tolerance is None and relative is None:
        verdict = equal(measured, expected, unit)
    else:
        verdict = near(measured, expected, tolerance or 0.0, relative or 0.0, unit)
    return _claim(sentence, verdict)


def slug_of(sentence: str) -> str:
    """The anchor of a claim: its words, joined by hyphens; a long one is cut and marked with a short hash."""
    words = re.sub(r"[^a-z0-9]+", "-", sentence.lower()).strip("-")
    if 0 < len(words) <= 60:
        return f"claim-{words}"
    mark = hashlib.sha256(sentence.encode()).hexdigest()[:6]
    return f"claim-{words[:50].rstrip('-')}-{mark}".replace("--", "-")


def _claim(sentence: str, verdict: Verdict) -> Claim:
    return Claim(sentence, verdict.holds, verdict.measured, verdict.expected, slug_of(sentence), verdict.narrow)


def _present(result: Claim) -> None:
    """Show the claim in a notebook, print it elsewhere."""
    try:
        from IPython import get_ipython
    except ImportError:
        print(result)
        return
    if get_ipython() is None:
        print(result)
    else:
        from IPython.display import display

        display(result)


def _with_code(sentence: str) -> str:
    """The sentence as HTML, with `backticks` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))
