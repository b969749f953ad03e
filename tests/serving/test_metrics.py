"""The metrics page: exact sums of a run whose times are known, in the names and the format of others."""

from __future__ import annotations

import builtins
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families
from toy_cluster import HELD_S, RUNS, STEP_S, TOKEN_S, TRACES, asked, engine

from kvlab.errors import KvlabError
from kvlab.serving import EventLog, Metrics, Summary
from kvlab.timing import pooled_itl


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the page by name and labels other than the model's."""
    found = dict[str, float]()
    for family in text_string_to_metric_families(metrics.page()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "toy"
            labels = "".join(f"{{{value}}}" for key, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("kvlab:") + labels] = sample.value
    return found


def watched(**options: Any) -> tuple[Any, Metrics]:
    made = engine(**options)
    metrics = Metrics(made.scheduler, "toy")
    made.listeners = (metrics,)
    return made, metrics


def test_a_run_with_known_times_gives_exact_sums() -> None:
    """Two requests: at 1 s five tokens and three answers, at 10 s two tokens and one answer."""
    made, metrics = watched(blocks=10)
    for _ in made.run([(1.0, asked(0, 1.0, 5, 3)), (10.0, asked(1, 10.0, 2, 1, cap=7))]):
        pass
    found = samples(metrics)
    prefill = (STEP_S + 5 * TOKEN_S, STEP_S + 2 * TOKEN_S)
    decode = 2 * (STEP_S + TOKEN_S) + (5 + 6) * HELD_S
    for name, total, count in (
        ("time_to_first_token_seconds", sum(prefill), 2),
        ("inter_token_latency_seconds", decode, 2),
        ("request_time_per_output_token_seconds", decode / 2, 1),
        ("e2e_request_latency_seconds", sum(prefill) + decode, 2),
        ("request_queue_time_seconds", 0, 2),
        ("request_prefill_time_seconds", sum(prefill), 2),
        ("request_decode_time_seconds", decode, 2),
        ("request_inference_time_seconds", sum(prefill) + decode, 2),
        ("iteration_tokens_total", 5 + 1 + 1 + 2, 4),
        ("request_prompt_tokens", 7, 2),
        ("request_generation_tokens", 4, 2),
        ("request_params_max_tokens", 3 + 7, 2),
        ("request_num_preemptions", 0, 2),
    ):
        assert found[f"{name}_sum"] == pytest.approx(total, abs=HELD_S), name  # half a token is rounded
        assert found[f"{name}_count"] == count, name
        assert found[f"{name}_bucket{{+Inf}}"] == count, name
    assert found["time_to_first_token_seconds_bucket{0.01}"] == 0
    assert found["time_to_first_token_seconds_bucket{0.02}"] == 2
    assert found["prompt_tokens_total"] == 7
    assert found["generation_tokens_total"] == 4
    assert found["request_success_total{length}"] == found["request_success_total{stop}"] == 1
    assert found["request_success_total{abort}"] == found["request_success_total{error}"] == 0
    assert found["num_preemptions_total"] == 0
    assert found["prefix_cache_queries_total"] == 7
    assert found["cache_config_info{4}{True}{40}{10}"] == 1


def test_gauges_show_what_is_there_now() -> None:
    made, metrics = watched(blocks=10, block_size=4, max_running=1)
    assert samples(metrics)["num_requests_running"] == samples(metrics)["kv_cache_usage_perc"] == 0
    for number in range(3):
        made.add_request(asked(number, 0, 6, 4))
    assert samples(metrics)["num_requests_waiting"] == 3
    made.step()
    found = samples(metrics)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 2)
    assert found["kv_cache_usage_perc"] == 0.2
    for _ in made.run():
        pass
    assert samples(metrics)["kv_cache_usage_perc"] == samples(metrics)["num_requests_running"] == 0


def test_a_wait_in_the_queue_is_no_prefill_and_no_decode() -> None:
    made, metrics = watched(max_running=1)
    for _ in made.run([(0.0, asked(0, 0, 5, 1)), (0.0, asked(1, 0, 5, 1))]):
        pass
    found = samples(metrics)
    step = STEP_S + 5 * TOKEN_S
    assert found["request_queue_time_seconds_sum"] == pytest.approx(step)
    assert found["request_prefill_time_seconds_sum"] == pytest.approx(2 * step)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(3 * step)


def test_what_was_aborted_is_counted_and_has_no_latency() -> None:
    made, metrics = watched()
    made.add_request(asked(0, 0, 5, 9))
    made.step()
    made.abort(0)
    found = samples(metrics)
    assert found["request_success_total{abort}"] == 1
    assert found["generation_tokens_total"] == 1
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["e2e_request_latency_seconds_count"] == found["request_prompt_tokens_count"] == 0


def test_prefixes_that_were_found_are_counted_in_tokens() -> None:
    made, metrics = watched(block_size=4)
    first, second = asked(0, 0, 9, 1), asked(0, 0, 9, 1)
    for request in (first, second):
        made.add_request(request)
        made.step()
    found = samples(metrics)
    assert found["prefix_cache_queries_total"] == 18
    assert found["prefix_cache_hits_total"] == 8
    assert found["prompt_tokens_total"] == 18
    assert found["iteration_tokens_total_sum"] == 9 + 1


@settings(max_examples=30)
@given(trace=TRACES, run=RUNS)
def test_the_page_agrees_with_the_log_and_counters_never_fall(
    trace: list[tuple[float, int, int]], run: dict[str, Any]
) -> None:
    made, metrics = watched(**run)
    log, summary = EventLog(), Summary()
    made.listeners = (metrics, log, summary)
    pages = [samples(metrics)]
    for index, _ in enumerate(made.run((t, asked(n, t, *rest)) for n, (t, *rest) in enumerate(trace))):
        if index % 5 == 0:
            pages.append(samples(metrics))
    pages.append(samples(metrics))
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for earlier, later in pairwise(pages):
        assert all(later[name] >= 0 for name in gauges)
        assert later["kv_cache_usage_perc"] <= 1
        for name in later.keys() - gauges:
            assert later[name] >= earlier.get(name, 0), name
    times, found = list(log.times().values()), pages[-1]
    for name, values in (
        ("time_to_first_token_seconds", [each.ttft for each in times]),
        ("inter_token_latency_seconds", pooled_itl(times)),
        ("request_time_per_output_token_seconds", [each.tpot for each in times if each.tpot is not None]),
        ("e2e_request_latency_seconds", [each.e2e for each in times]),
    ):
        assert found[f"{name}_sum"] == pytest.approx(sum(value or 0 for value in values)), name
        assert found[f"{name}_count"] == len(values), name
    assert found["request_inference_time_seconds_sum"] == pytest.approx(
        found["request_prefill_time_seconds_sum"] + found["request_decode_time_seconds_sum"]
    )
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(
        found["request_queue_time_seconds_sum"] + found["request_inference_time_seconds_sum"]
    )
    assert found["num_preemptions_total"] == found["request_num_preemptions_sum"] == summary.preemptions
    assert found["iteration_tokens_total_sum"] == summary.tokens_fed
    assert found["iteration_tokens_total_count"] == summary.steps
    assert found["generation_tokens_total"] == summary.tokens_out
    assert found["prompt_tokens_total"] == summary.tokens_in


def test_two_engines_have_pages_of_their_own() -> None:
    one, two = watched()[1], watched()[1]
    one._generated.inc(3)
    assert samples(two)["generation_tokens_total"] == 0


def test_without_prometheus_client_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(KvlabError, match=r"pip install 'kvlab\[serve\]'"):
        Metrics(engine().scheduler, "toy")
