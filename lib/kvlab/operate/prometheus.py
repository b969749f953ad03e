"""A metrics page, as vLLM, llama.cpp's server and the engine of this library write it.

The text format is that of Prometheus; ``prometheus_client`` parses it. What is added here: which engine wrote the page,
sums over the engines behind one address, and differences between two reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from typing import Literal

from kvlab.errors import KvlabError, MeasureError, one_line

Kind = Literal["vllm", "kvlab", "llamacpp"]
Labels = Mapping[str, str]
_KINDS: tuple[Kind, ...] = ("vllm", "kvlab", "llamacpp")
# What vLLM called these before its version 0.10; pages of older servers are read too.
_FORMER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "prefix_cache_queries_total": "gpu_prefix_cache_queries_total",
    "prefix_cache_hits_total": "gpu_prefix_cache_hits_total",
}


@dataclass(frozen=True)
class Distribution:
    """How often, how much in all, and how it is spread: a Prometheus histogram, or values of our own.

    Args:
        count: of the observations.
        sum: of them.
        buckets: upper edges with the observations at or below them, in order; empty where only the sum is known.
    """

    count: float
    sum: float
    buckets: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Of values that are known one by one: every value is an edge, so that nothing is lost.

        Args:
            values: in any order; None comes back where there is none.
        """
        ranked = sorted(values)
        if not ranked:
            return None
        edges = {value: float(place) for place, value in enumerate(ranked, 1)}
        return cls(float(len(ranked)), sum(ranked), tuple(edges.items()))

    @property
    def mean(self) -> float:
        """The average: exact, whatever the buckets are."""
        return self.sum / self.count

    def minus(self, earlier: Distribution | None) -> Distribution:
        """What came between an earlier read and this one.

        Args:
            earlier: the same histogram, read before.
        """
        if earlier is None:
            return self
        below = dict(earlier.buckets)
        buckets = tuple((edge, count - below.get(edge, 0.0)) for edge, count in self.buckets)
        return Distribution(self.count - earlier.count, self.sum - earlier.sum, buckets)

    def bounds(self, percent: float) -> tuple[float, float] | None:
        """Between which edges a percentile lies. A bucket says no more than that; None where there are no buckets.

        Args:
            percent: 0 to 100; 50 is the median.
        """
        rank, low = percent / 100 * self.count, 0.0
        for edge, count in self.buckets:
            if count > 0 and count >= rank:
                return low, edge
            low = edge
        return None

    def above(self, edge: float) -> tuple[float, float]:
        """How many observations are surely as large as this, and the least that they sum to.

        Args:
            edge: buckets that begin below it do not count.
        """
        n = total = low = before = 0.0
        for upper, count in self.buckets:
            if low >= edge:
                n += count - before
                total += (count - before) * low
            low, before = upper, count
        return n, total


@dataclass(frozen=True)
class Page:
    """One read of a metrics page.

    Args:
        kind: who wrote it, by the prefix of the names.
        samples: by name without that prefix, labels and values. Names of others keep theirs. NaN is left out.
        notes: what is odd about the page, a sentence each.
    """

    kind: Kind
    samples: Mapping[str, Sequence[tuple[Labels, float]]] = field(repr=False)
    notes: tuple[str, ...] = ()

    def rows(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """The samples of a name, under its former one where the page is older.

        Args:
            name: without the prefix of the engine.
            labels: that must have these values.
        """
        found = self.samples.get(name) or self.samples.get(_FORMER.get(name, ""), ())
        return [row for row in found if all(row[0].get(key) == value for key, value in labels.items())]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over every engine and every other label; None where the page has no such sample.

        Args:
            name: without the prefix of the engine.
            labels: that must have these values.
        """
        found = self.rows(name, **labels)
        return sum(value for _, value in found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest over the engines: one full pool stalls its own requests, however empty the others are.

        Args:
            name: without the prefix of the engine.
        """
        return max((value for _, value in self.rows(name)), default=None)

    def label(self, name: str, label: str) -> str | None:
        """The value of a label, as of an ``_info`` metric; None where it is absent or differs between engines.

        Args:
            name: without the prefix of the engine.
            label: its name.
        """
        found = {labels.get(label) for labels, _ in self.rows(name)}
        return found.pop() if len(found) == 1 else None

    def distribution(self, name: str) -> Distribution | None:
        """A histogram, summed over the engines; None where it is absent or a part of it is missing.

        Args:
            name: without the prefix of the engine and without ``_bucket``.
        """
        former = _FORMER.get(name, name)
        stem = name if f"{name}_count" in self.samples else former
        count, total = self.total(f"{stem}_count"), self.total(f"{stem}_sum")
        if count is None or total is None:
            return None
        edges: defaultdict[float, float] = defaultdict(float)
        for labels, value in self.rows(f"{stem}_bucket"):
            edges[float(labels["le"])] += value
        # A page that was cut in the middle of a histogram has no last bucket; then only the sum is good.
        whole = edges.get(inf) == count
        return Distribution(count, total, tuple(sorted(edges.items())) if whole else ())

    @property
    def engines(self) -> int:
        """Engines behind this page: data parallel ones share an address and differ in the label ``engine``."""
        return max(len(self.rows("num_requests_running")), 1)


def read_page(text: str) -> Page:
    """Parse a metrics page.

    Args:
        text: the body of the answer, or a file that holds it.

    Raises:
        MeasureError: it is empty, not a metrics page, or of an engine whose names are not known here.
        KvlabError: ``prometheus_client`` is not installed.
    """
    _refuse_other_formats(text)
    samples, notes = _samples(text)
    kinds = [kind for kind in _KINDS if any(name.startswith(f"{kind}:") for name in samples)]
    if not kinds:
        others = sorted({name.split(":")[0] + ":" for name in samples if ":" in name} or list(samples)[:4])
        raise MeasureError(
            f"a metrics page of {len(samples)} names, and none is vLLM's (vllm:), llama.cpp's (llamacpp:) or this "
            f"library's (kvlab:); it has {', '.join(others[:4])}. Give the page of such a server; vLLM leaves its "
            "names out under --disable-log-stats"
        )
    kind = kinds[0]
    named = {name.removeprefix(f"{kind}:"): rows for name, rows in samples.items()}
    return Page(kind, named, tuple(notes))


def _refuse_other_formats(text: str) -> None:
    start = text.lstrip()[:200].lower()
    if not start:
        raise MeasureError("the page is empty; give the text that the server answers at /metrics")
    if start.startswith("<"):
        raise MeasureError("this is an HTML page, no metrics page; the address of a vLLM server's ends in /metrics")
    if start.startswith(("{", "[")):
        raise MeasureError(
            f"this is JSON, no metrics page: {one_line(ValueError(text[:80]))}; the address ends in /metrics, "
            "llama.cpp's server needs --metrics, and transformers serve has no such page"
        )


def _samples(text: str) -> tuple[dict[str, list[tuple[Labels, float]]], list[str]]:
    """By name; what cannot be used is said."""
    notes, odd = [], 0
    if not text.endswith("\n"):
        notes.append("The page does not end with a line end: it may have been cut, and its last values be wrong.")
    samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for name, labels, value in _parsed(text):
        if isnan(value) or not isfinite(value):
            odd += 1
        elif not name.endswith("_created"):
            # Unix times that every counter brings along; summed with the data they drown it.
            samples[name].append((labels, value))
    if odd:
        notes.append(f"{odd} values are not numbers and were left out.")
    return dict(samples), notes


def _parsed(text: str) -> list[tuple[str, Labels, float]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families as parse
    except ImportError:
        raise KvlabError(
            "reading a metrics page needs the package prometheus_client; run: pip install 'kvlab[serve]'"
        ) from None
    whole = text if text.endswith("\n") else _without_a_broken_end(text, parse)
    try:
        return [(each.name, each.labels, float(each.value)) for family in parse(whole) for each in family.samples]
    except (ValueError, IndexError, KeyError) as failure:
        raise MeasureError(
            f"this is no metrics page: {one_line(failure)[:120]}; give the text that the server answers at /metrics"
        ) from None


def _without_a_broken_end(text: str, parse: object) -> str:
    """A page that was cut in the middle of a line, without that line where it cannot be read."""
    body, _, last = text.rpartition("\n")
    assert callable(parse)
    try:
        list(parse(last + "\n"))
    except (ValueError, IndexError, KeyError):
        return body + "\n"
    return text + "\n"
