"""Reading a metrics page: what counts, what does not, and what is no such page."""

from __future__ import annotations

import builtins
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_pages import captured

from kvlab.errors import KvlabError, MeasureError
from kvlab.operate.prometheus import Distribution, read_page
from kvlab.timing import percentile

VALUES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("  \n\n", "empty"),
        ("<!doctype html><html>Sign in</html>", "HTML"),
        ('{"detail":"Not Found"}', "JSON"),
        ("Internal Server Error\nat line 3\n", "no metrics page"),
        ("go_goroutines 12\nprocess_open_fds 3\n", "none is vLLM's"),
        ("sglang:num_running_reqs 3\n", "sglang:"),
    ],
)
def test_what_is_no_page_of_a_known_engine_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(MeasureError, match=says) as refusal:
        read_page(text)
    assert "\n" not in str(refusal.value)


def test_a_captured_page_is_read_whole() -> None:
    page = read_page(captured("vllm_load32_during"))
    assert page.kind == "vllm"
    assert page.notes == ()
    assert page.total("prompt_tokens_total") == 9120
    assert page.total("num_requests_waiting") == 16
    assert page.label("cache_config_info", "enable_prefix_caching") == "True"
    ttft = page.distribution("time_to_first_token_seconds")
    assert ttft is not None
    assert (ttft.count, ttft.sum) == (39, 8.342714548110962)
    assert not any(name.endswith("_created") for name in page.samples)


def test_a_histogram_whose_name_ends_in_total_is_one() -> None:
    steps = read_page(captured("vllm_load32_after")).distribution("iteration_tokens_total")
    assert steps is not None
    assert (steps.count, steps.sum) == (765, 16928)


def test_engines_are_added_up_and_the_fullest_pool_counts() -> None:
    lines = [
        f'vllm:{name}{{engine="{engine}"}} {value}'
        for engine in (0, 1)
        for name, value in (("num_requests_running", 3), ("kv_cache_usage_perc", 0.4 + engine / 2), ("a_total", 5))
    ]
    page = read_page("\n".join(lines) + "\n")
    assert (page.engines, page.total("num_requests_running"), page.total("a_total")) == (2, 6, 10)
    assert page.largest("kv_cache_usage_perc") == 0.9
    assert page.total("a_total", engine="1") == 5


def test_a_label_that_differs_between_engines_says_nothing() -> None:
    page = read_page('vllm:x{engine="0",size="1"} 1\nvllm:x{engine="1",size="2"} 1\nvllm:y{size="3"} 1\n')
    assert (page.label("x", "size"), page.label("y", "size"), page.label("z", "size")) == (None, "3", None)


def test_what_is_absent_is_none_and_what_is_zero_is_zero() -> None:
    page = read_page("vllm:a_total 0\n")
    assert (page.total("a_total"), page.total("b_total"), page.largest("b"), page.distribution("b")) == (0, *[None] * 3)


def test_names_of_older_vllm_are_understood() -> None:
    page = read_page(
        "vllm:gpu_cache_usage_perc 0.7\nvllm:time_per_output_token_seconds_count 4\n"
        'vllm:time_per_output_token_seconds_sum 2\nvllm:time_per_output_token_seconds_bucket{le="+Inf"} 4\n'
    )
    assert page.largest("kv_cache_usage_perc") == 0.7
    gaps = page.distribution("inter_token_latency_seconds")
    assert gaps is not None
    assert gaps.mean == 0.5


def test_what_is_not_a_number_is_left_out_and_said() -> None:
    page = read_page("vllm:a_total NaN\nvllm:b_total +Inf\nvllm:c_total 3\n")
    assert (page.total("a_total"), page.total("b_total"), page.total("c_total")) == (None, None, 3)
    assert page.notes == ("2 values are not numbers and were left out.",)


def test_a_page_that_was_cut_keeps_what_is_whole() -> None:
    page = read_page('vllm:a_total 3\nvllm:b_bucket{le="1"} 2\nvllm:b_count 5\nvllm:b_sum 4\nvllm:c{le="')
    assert page.total("a_total") == 3
    assert page.rows("c") == []
    assert "may have been cut" in page.notes[0]
    # The bucket that has all of them is missing: the sum is good, the spread is not.
    cut = page.distribution("b")
    assert cut is not None
    assert (cut.mean, cut.buckets) == (0.8, ())


def test_without_the_parser_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KvlabError, match=r"pip install 'kvlab\[serve\]'"):
        read_page("vllm:a 1\n")


@given(VALUES)
def test_values_of_our_own_lose_nothing(values: list[float]) -> None:
    spread = Distribution.of(values)
    assert spread is not None
    assert spread.count == len(values)
    assert spread.sum == pytest.approx(sum(values))
    for percent in (50, 99, 100):
        low, high = spread.bounds(percent) or (inf, -inf)
        assert low <= high
        assert high in values
    assert spread.bounds(100)[1] == percentile(values, 100)  # type: ignore[index]


@given(VALUES, st.floats(0, 1e6))
def test_what_lies_above_an_edge_is_never_overstated(values: list[float], edge: float) -> None:
    spread = Distribution.of(values)
    assert spread is not None
    n, total = spread.above(edge)
    large = [value for value in values if value >= edge]
    assert n <= len(large)
    assert total <= sum(large) * (1 + 1e-9)


def test_between_two_reads_only_what_came_on_top_counts() -> None:
    before = Distribution(2, 3.0, ((1.0, 1.0), (inf, 2.0)))
    after = Distribution(5, 30.0, ((1.0, 2.0), (inf, 5.0)))
    assert after.minus(before) == Distribution(3, 27.0, ((1.0, 1.0), (inf, 3.0)))
    assert after.minus(None) == after


def test_a_percentile_lies_between_the_edges_of_its_bucket() -> None:
    spread = Distribution(10, 20.0, ((1.0, 4.0), (2.0, 9.0), (inf, 10.0)))
    assert spread.bounds(40) == (0.0, 1.0)
    assert spread.bounds(50) == (1.0, 2.0)
    assert spread.bounds(99) == (2.0, inf)
    assert Distribution(10, 20.0).bounds(50) is None
    assert Distribution.of([]) is None
