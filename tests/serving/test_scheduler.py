"""Who computes how many tokens: the policies, the orders, the blocks, and what is refused."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count

import pytest

from kvlab.cache import BlockPool
from kvlab.errors import ConfigError, RequestRefused
from kvlab.serving import Order, Plan, Policy, Request, Scheduler, TokenRequest


def scheduler_of(n_blocks: int = 100, block_size: int = 4, **options: object) -> Scheduler:
    return Scheduler(BlockPool(n_blocks, block_size), **options)  # type: ignore[arg-type]


def add(scheduler: Scheduler, id: Hashable, prompt: int, new: int = 1) -> Request:
    request = Request(id, prompt, new)
    scheduler.add(request)
    return request


def advance(scheduler: Scheduler) -> Plan:
    """Plan a step, take it with made-up tokens, and look at the books."""
    plan = scheduler.schedule()
    assert plan.total == sum(plan.tokens.values())
    assert 0 <= plan.total <= scheduler.token_budget
    assert not set(plan.admitted) & set(plan.preempted)
    for request, fed in list(plan.tokens.items()):
        tokens = [5] * (1 + len(request.draft)) if fed == request.remaining + len(request.draft) else []
        scheduler.computed(request, fed, request.append(tokens))
    scheduler.check()
    return plan


def fed(plan: Plan) -> dict[Hashable, int]:
    return {request.id: tokens for request, tokens in plan.tokens.items()}


def until_done(scheduler: Scheduler, most: int = 10_000) -> Iterator[Plan]:
    for _ in range(most):
        if not scheduler.unfinished:
            return
        yield advance(scheduler)
    raise AssertionError("somebody never ends")


# The policies.


def test_static_reserves_prompt_and_cap_and_nobody_joins_a_batch() -> None:
    scheduler = scheduler_of(n_blocks=4, policy="static")
    a, b, c = add(scheduler, "a", 4, 3), add(scheduler, "b", 4, 5), add(scheduler, "c", 1, 1)
    assert fed(advance(scheduler)) == {"a": 4, "b": 4}  # 6 and 8 tokens at most: two blocks each, and the pool is full
    assert [len(a.table), len(b.table), scheduler.pool.n_free] == [2, 2, 0]
    assert fed(advance(scheduler)) == {"a": 1, "b": 1}
    assert fed(advance(scheduler)) == {"a": 1, "b": 1}
    assert a.finish == "length"
    assert scheduler.pool.n_free == 2
    assert fed(advance(scheduler)) == {"b": 1}  # c would fit
    assert fed(advance(scheduler)) == {"b": 1}
    assert c.num_computed_tokens == 0
    assert fed(advance(scheduler)) == {"c": 1}


def test_static_forms_a_batch_of_prompts_that_fit_the_budget() -> None:
    scheduler = scheduler_of(policy="static", token_budget=10)
    for id, prompt in (("a", 6), ("b", 4), ("c", 1)):
        add(scheduler, id, prompt)
    assert fed(advance(scheduler)) == {"a": 6, "b": 4}
    assert fed(advance(scheduler)) == {"c": 1}


def test_continuous_reads_prompts_in_steps_of_their_own_while_others_wait() -> None:
    scheduler = scheduler_of(policy="continuous", token_budget=10)
    add(scheduler, "a", 4, 6)
    assert fed(advance(scheduler)) == {"a": 4}
    assert fed(advance(scheduler)) == {"a": 1}
    add(scheduler, "b", 5, 2)
    add(scheduler, "c", 6, 2)
    assert fed(advance(scheduler)) == {"b": 5}  # 5 + 6 are more than the budget
    assert fed(advance(scheduler)) == {"c": 6}
    assert fed(advance(scheduler)) == {"a": 1, "b": 1, "c": 1}


def test_chunked_gives_decodes_a_token_first_and_what_is_left_to_prompts() -> None:
    scheduler = scheduler_of(policy="chunked", token_budget=6)
    add(scheduler, "a", 2, 9)
    add(scheduler, "b", 1, 9)
    assert fed(advance(scheduler)) == {"a": 2, "b": 1}
    add(scheduler, "c", 9, 2)
    assert fed(advance(scheduler)) == {"a": 1, "b": 1, "c": 4}
    add(scheduler, "d", 1, 1)
    assert fed(advance(scheduler)) == {"a": 1, "b": 1, "c": 4}  # who is half-way comes before who waits
    assert fed(advance(scheduler)) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_budget_goes_negative_never_with_chunks_of_4_and_six_decodes() -> None:
    """sarathi-serve: the decodes alone were more than the budget. Two of the six wait, and all of them end."""
    scheduler = scheduler_of(policy="chunked", token_budget=4)
    for id in range(6):
        add(scheduler, id, 1, 8)
    add(scheduler, "prompt", 10, 2)
    plans = list(until_done(scheduler))  # advance() looks at the budget after every step
    assert max(len(plan.tokens) for plan in plans) == 4
    assert sum(plan.total for plan in plans) == 6 * 8 + 10 + 1


@pytest.mark.parametrize("policy", list(Policy))
def test_max_running_is_never_exceeded(policy: Policy) -> None:
    scheduler = scheduler_of(policy=policy, max_running=3)
    for id in range(8):
        add(scheduler, id, 3, 4)
    for _ in until_done(scheduler):
        assert len(scheduler.running) <= 3


def test_one_partial_prefill_blocks_all_130_000_tokens_alone_take_254_steps() -> None:
    scheduler = scheduler_of(9000, 16, token_budget=512)
    add(scheduler, "long", 130_000)
    assert len(list(until_done(scheduler))) == 254


@pytest.mark.parametrize("order", list(Order))
def test_one_partial_prefill_blocks_all_beside_decodes_it_takes_longer_and_short_requests_end(order: Order) -> None:
    """vllm 21495. Six decodes leave 506 of 512 tokens to it: 257 steps, and more where short ones overtake it."""
    scheduler = scheduler_of(9000, 16, token_budget=512, order=order)
    for id in range(6):
        add(scheduler, id, 1, 1000)
    advance(scheduler)
    long, shorts = add(scheduler, "long", 130_000), list[Request]()
    done, ends = count(1), dict[Hashable, int]()
    while long.finish is None:
        step = next(done)
        if step % 10 == 0:
            shorts.append(add(scheduler, ("short", step), 50))
        assert len(advance(scheduler).tokens) >= 7
        ends.update({short.id: step for short in shorts if short.finish and short.id not in ends})
    assert next(done) - 1 >= 257
    if order is Order.SHORTEST:
        assert len(ends) == len(shorts)
        assert all(step <= id[1] + 1 for id, step in ends.items())  # type: ignore[index]
    else:
        assert not any(step < id[1] for id, step in ends.items())  # type: ignore[index]
        list(until_done(scheduler))
    assert all(short.finish == "length" for short in shorts)


# Who comes first.


@pytest.mark.parametrize("policy", list(Policy))
def test_first_come_first_served_lets_nobody_pass(policy: Policy) -> None:
    """The first in line does not fit: the one behind it, which would, waits too."""
    scheduler = scheduler_of(n_blocks=6, policy=policy, token_budget=30)
    add(scheduler, "runs", 8, 8)
    advance(scheduler)
    add(scheduler, "large", 16, 2)
    add(scheduler, "small", 1, 1)
    assert [request.id for request in scheduler.waiting] == ["large", "small"]
    assert fed(advance(scheduler)) == {"runs": 1}
    order = [request.id for plan in until_done(scheduler) for request in plan.admitted]
    assert order == ["large", "small"]


def test_shortest_first_and_by_arrival_among_equals() -> None:
    scheduler = scheduler_of(order="shortest", max_running=1)
    for id, prompt in (("long", 9), ("first", 3), ("second", 3), ("short", 2)):
        add(scheduler, id, prompt)
    assert [request.id for request in scheduler.waiting] == ["short", "first", "second", "long"]
    assert [[*fed(plan)] for plan in until_done(scheduler)] == [["short"], ["first"], ["second"], ["long"]]


@pytest.mark.parametrize(("ageing", "waits"), [(0.0, None), (8.0, 12), (1.0, 96), (1000.0, 1)])
def test_a_long_prompt_starves_under_a_stream_of_short_ones_only_without_ageing(
    ageing: float, waits: int | None
) -> None:
    """One of 4 tokens arrives at every step and takes it; the long one of 100 waits until its age makes up for 96."""
    scheduler = scheduler_of(order="shortest", ageing=ageing, max_running=1)
    long = add(scheduler, "long", 100)
    for step in range(200):
        add(scheduler, step, 4)
        if long in advance(scheduler).tokens:
            assert step == waits
            return
    assert waits is None


def test_a_short_prompt_overtakes_a_long_one_that_is_half_read_in_the_order_shortest() -> None:
    for order, second in (("shortest", {"short": 2, "long": 6}), ("fcfs", {"long": 8})):
        scheduler = scheduler_of(order=order, ageing=0, token_budget=8)
        add(scheduler, "long", 40)
        advance(scheduler)
        add(scheduler, "short", 2)
        assert fed(advance(scheduler)) == second


# Blocks.


def test_whoever_joined_last_loses_its_blocks_and_is_next_in_line() -> None:
    scheduler = scheduler_of(n_blocks=5, block_size=2)
    a, b = add(scheduler, "a", 2, 7), add(scheduler, "b", 2, 7)
    advance(scheduler)
    add(scheduler, "c", 2, 1)
    preempted = [plan.preempted for plan in until_done(scheduler) if plan.preempted]
    assert preempted[0] == [b]
    assert a.preemptions == 0
    assert all(request.finish == "length" for request in (a, b))


def test_a_preempted_request_comes_before_those_that_arrived_after_it() -> None:
    scheduler = scheduler_of(n_blocks=5, block_size=2)
    add(scheduler, "a", 2, 7)
    b = add(scheduler, "b", 2, 7)
    advance(scheduler)
    c = add(scheduler, "c", 2, 1)
    while not b.preemptions:
        advance(scheduler)
    assert scheduler.waiting == [b, c]
    assert (b.table, b.contents, b.num_computed_tokens) == ([], [], 0)
    assert b.num_tokens > 2  # what it said is kept


def test_preemption_thrash_is_bounded_and_all_finish() -> None:
    """vllm 21809. Twelve answers of four blocks each grow in a pool of five: each is thrown out once at most."""
    scheduler = scheduler_of(n_blocks=5, block_size=4)
    requests = [add(scheduler, id, 4, 12) for id in range(12)]
    plans = list(until_done(scheduler))
    assert all(request.finish == "length" for request in requests)
    assert max(request.preemptions for request in requests) <= 1
    assert sum(plan.total for plan in plans) <= 2 * sum(request.longest for request in requests)


def test_nobody_is_admitted_who_would_leave_those_that_run_no_block_to_grow() -> None:
    scheduler = scheduler_of(n_blocks=4, block_size=4, policy="continuous")
    add(scheduler, "a", 8, 2)  # two blocks, and one to grow
    add(scheduler, "b", 8, 1)
    assert fed(advance(scheduler)) == {"a": 8}
    assert fed(advance(scheduler)) == {"a": 1}
    assert fed(advance(scheduler)) == {"b": 8}


def test_a_half_read_prompt_keeps_its_room() -> None:
    """Its first piece took two blocks of the five that it needs; nobody may be let in who needs the other three."""
    scheduler = scheduler_of(n_blocks=7, block_size=4, token_budget=8, order="shortest", ageing=0)
    long = add(scheduler, "long", 20)
    advance(scheduler)
    add(scheduler, "short", 8)
    plans = list(until_done(scheduler))
    assert not any(plan.preempted for plan in plans)
    assert long.preemptions == 0


def test_a_pool_that_is_too_small_for_one_step_reads_what_fits() -> None:
    """Everybody fits alone, not all at once: the step takes those for whom there are blocks."""
    scheduler = scheduler_of(n_blocks=4, block_size=2, token_budget=100)
    requests = [add(scheduler, id, 5, 3) for id in range(4)]
    assert fed(advance(scheduler)) == {0: 5}
    list(until_done(scheduler))
    assert all(request.finish == "length" for request in requests)


# Prefixes.


def tokens_request(scheduler: Scheduler, id: Hashable, tokens: list[int], new: int = 1) -> TokenRequest:
    request = TokenRequest.of(id, tokens, new)
    scheduler.add(request)
    return request


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("prompt", "found"), [(8, 4), (9, 8), (3, 0), (12, 8)])
def test_prefix_hit_of_the_whole_prompt_leaves_the_last_token_to_compute(
    policy: Policy, prompt: int, found: int
) -> None:
    """nano-vllm 144: with every block found there was no query, and no logits."""
    scheduler = scheduler_of(policy=policy)
    tokens_request(scheduler, "a", list(range(prompt)))
    assert fed(advance(scheduler)) == {"a": prompt}
    b = tokens_request(scheduler, "b", list(range(prompt)))
    plan = advance(scheduler)
    assert plan.admitted == {b: found}
    assert fed(plan) == {"b": prompt - found}
    assert b.new_tokens == 1
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (2 * prompt, found)


def test_answers_are_found_as_well_as_prompts() -> None:
    """The next turn of a conversation: the history is there, but for the last token, which was never fed."""
    scheduler = scheduler_of()
    a = tokens_request(scheduler, "a", [1, 2, 3], 7)
    list(until_done(scheduler))
    b = tokens_request(scheduler, "b", [*a.tokens, 9, 9])
    assert advance(scheduler).admitted == {b: 8}


def test_those_who_run_share_blocks_and_count_them_once() -> None:
    scheduler = scheduler_of(n_blocks=6)
    tokens_request(scheduler, "a", list(range(9)), 4)
    advance(scheduler)
    tokens_request(scheduler, "b", list(range(9)), 4)
    advance(scheduler)
    assert scheduler.pool.n_used == 2 + 1 + 1
    list(until_done(scheduler))


def test_without_reuse_nothing_is_looked_up() -> None:
    scheduler = scheduler_of(reuse_prefixes=False)
    for id in "ab":
        tokens_request(scheduler, id, list(range(9)))
        assert fed(advance(scheduler)) == {id: 9}
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (0, 0)


def test_requests_without_contents_share_nothing() -> None:
    scheduler = scheduler_of()
    for id in "ab":
        add(scheduler, id, 9)
        assert fed(advance(scheduler)) == {id: 9}


def test_preempt_then_prefix_hit_counts_right() -> None:
    """nano-vllm 207. What the preempted one had computed is found again where nobody needed the blocks."""
    scheduler = scheduler_of(n_blocks=7, block_size=2)
    a, b = tokens_request(scheduler, "a", [1, 2, 3], 8), tokens_request(scheduler, "b", [4, 5, 6], 8)
    found = dict[Request, list[int]]()
    for plan in until_done(scheduler):
        for request, hit in plan.admitted.items():
            found.setdefault(request, []).append(hit)
    assert a.preemptions == 0
    assert b.preemptions == 1
    assert found[b][1] > 0
    assert (a.new_tokens, b.new_tokens) == (8, 8)
    assert scheduler.prefix_queries == 6  # the prompts, once each


# Drafts.


def test_a_draft_is_cut_to_the_budget_and_to_what_is_left_of_the_answer() -> None:
    scheduler = scheduler_of(token_budget=5)
    a, b = add(scheduler, "a", 1, 9), add(scheduler, "b", 1, 4)
    advance(scheduler)
    a.draft, b.draft = (5, 5), (5, 5, 5, 5)
    plan = scheduler.schedule()
    assert fed(plan) == {"a": 3, "b": 2}
    assert [a.draft, b.draft] == [(5, 5), (5,)]
    scheduler = scheduler_of()
    b = add(scheduler, "b", 1, 4)
    advance(scheduler)
    b.draft = (5, 5, 5, 5)
    assert fed(advance(scheduler)) == {"b": 3}  # three are left, and a pass says one more than its draft
    assert b.finish == "length"


def test_a_draft_takes_nobodys_blocks() -> None:
    scheduler = scheduler_of(n_blocks=3, block_size=2)
    a, b = add(scheduler, "a", 2, 4), add(scheduler, "b", 1, 4)
    advance(scheduler)
    b.draft = (5, 5, 5)
    plan = advance(scheduler)
    assert not plan.preempted
    assert fed(plan) == {"a": 1, "b": 1}
    assert not b.preemptions
    assert a in scheduler.running


def test_rejected_guesses_do_not_count() -> None:
    scheduler = scheduler_of()
    a = add(scheduler, "a", 1, 9)
    advance(scheduler)
    a.draft = (5, 5, 5)
    plan = scheduler.schedule()
    assert fed(plan) == {"a": 4}
    scheduler.computed(a, 4, a.append([7]))  # the first was wrong
    assert (a.num_tokens, a.num_computed_tokens, a.remaining, a.draft) == (3, 2, 1, ())


# Forks.


def test_a_fork_shares_blocks_and_goes_its_own_way() -> None:
    scheduler = scheduler_of()
    a = add(scheduler, "a", 6, 9)
    advance(scheduler)
    b = Request("b", 6, 9)
    scheduler.fork(a, b)
    assert (b.table, b.num_tokens, b.num_computed_tokens) == (a.table, 7, 6)
    assert scheduler.pool.n_used == 2
    plan = scheduler.schedule()
    assert fed(plan) == {"a": 1, "b": 1}
    assert len(plan.copies) == 1
    assert a.table[0] == b.table[0]
    assert a.table[1] != b.table[1]
    scheduler.check()


def test_a_fork_of_a_half_read_prompt_reads_the_rest_itself() -> None:
    scheduler = scheduler_of(token_budget=6)
    a = add(scheduler, "a", 10, 2)
    advance(scheduler)
    b = Request("b", 10, 2)
    scheduler.fork(a, b)
    assert [fed(plan) for plan in until_done(scheduler)] == [{"a": 4, "b": 2}, {"a": 1, "b": 2}, {"b": 1}]
    assert (a.finish, b.finish) == ("length", "length")


@pytest.mark.parametrize(
    ("options", "twin", "message"),
    [
        ({"policy": "static"}, "b", "a static batch takes nobody in"),
        ({"max_running": 1}, "b", "of max_running 1 one place; 1 run"),
        ({}, "a", "cannot be forked as 'a'"),
    ],
)
def test_forks_that_cannot_be(options: dict[str, object], twin: str, message: str) -> None:
    scheduler = scheduler_of(**options)  # type: ignore[arg-type]
    a = add(scheduler, "a", 2, 9)
    advance(scheduler)
    with pytest.raises(ConfigError, match=message):
        scheduler.fork(a, Request(twin, 2, 9))
    scheduler.check()


def test_who_waits_cannot_be_forked() -> None:
    scheduler = scheduler_of()
    with pytest.raises(ConfigError, match="it must run"):
        scheduler.fork(add(scheduler, "a", 2, 9), Request("b", 2, 9))


# Steps in a row.


def test_only_a_step_of_single_tokens_in_which_nobody_came_or_went_is_repeatable() -> None:
    scheduler = scheduler_of(n_blocks=5, block_size=2)
    a, b = add(scheduler, "a", 2, 7), add(scheduler, "b", 2, 7)
    seen = [(plan.repeatable, bool(plan.admitted), bool(plan.preempted)) for plan in until_done(scheduler)]
    assert (False, True, False) in seen
    assert (False, False, True) in seen
    assert (True, False, False) in seen
    assert not any(repeatable and (came or went) for repeatable, came, went in seen)
    assert a.finish == b.finish == "length"
    assert not scheduler.schedule().repeatable  # nobody is there


@pytest.mark.parametrize(("most", "times"), [(1, 1), (4, 4), (100, 6)])
def test_a_step_is_repeated_until_somebody_ends(most: int, times: int) -> None:
    scheduler = scheduler_of()
    a, b = add(scheduler, "a", 4, 7), add(scheduler, "b", 4, 40)
    advance(scheduler)
    plan = scheduler.schedule()
    scheduler.repeat(plan, most)
    assert plan.repeats == times
    assert [len(a.table), len(b.table)] == [scheduler.pool.blocks_for(4 + times)] * 2
    scheduler.check()


def test_a_step_is_repeated_as_far_as_the_blocks_go() -> None:
    scheduler = scheduler_of(n_blocks=6)
    a, b = add(scheduler, "a", 4, 17), add(scheduler, "b", 4, 17)
    advance(scheduler)
    plan = scheduler.schedule()
    scheduler.repeat(plan, 100)
    assert 4 <= plan.repeats <= 8
    assert len(a.table) + len(b.table) <= 6
    assert not plan.preempted
    scheduler.check()


def test_repeated_steps_age_those_who_wait() -> None:
    """The long one waits through steps 1 to 11; that ten of them were planned at once makes no difference."""
    scheduler = scheduler_of(order="shortest", ageing=1.0, max_running=1)
    runs = add(scheduler, "runs", 4, 12)
    advance(scheduler)
    add(scheduler, "long", 9)
    plan = scheduler.schedule()
    scheduler.repeat(plan, 10)
    scheduler.computed(runs, 10, runs.append([5] * plan.repeats))
    add(scheduler, "short", 1)
    assert [request.id for request in scheduler.waiting] == ["long", "short"]


def test_a_step_alone_has_its_own_copies() -> None:
    a, b = Request("a", 1, 1), Request("b", 1, 1)
    a.table, b.table = [3, 4], [5]
    plan = Plan({a: 1, b: 2}, [(0, 4), (1, 5)], repeats=3)
    assert plan.total == 3
    alone = plan.alone(a)
    assert (alone.tokens, alone.copies, alone.repeats, alone.total) == ({a: 1}, [(0, 4)], 3, 1)
    plan.drop(a)
    plan.drop(a)
    assert (plan.tokens, plan.total) == ({b: 2}, 2)


# Ends.


def test_who_waits_and_who_runs_can_be_taken_out_at_any_time() -> None:
    scheduler = scheduler_of(max_running=1, order="shortest")
    requests = [add(scheduler, id, 20 - id, 3) for id in range(10)]
    advance(scheduler)
    running = scheduler.running[0]
    for request in (requests[4], running, requests[0]):
        scheduler.end(request)
        scheduler.check()
    assert scheduler.unfinished == 7
    assert scheduler.pool.n_free == scheduler.pool.n_blocks
    assert [request.prompt_tokens for request in scheduler.waiting] == [12, 13, 14, 15, 17, 18, 19]
    list(until_done(scheduler))


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    scheduler = scheduler_of()
    first = add(scheduler, "a", 2)
    assert scheduler.find("a") is first
    with pytest.raises(ConfigError, match="a request 'a' waits or runs already"):
        add(scheduler, "a", 2)
    advance(scheduler)
    with pytest.raises(ConfigError, match="no request 'a' waits or runs"):
        scheduler.find("a")
    with pytest.raises(ConfigError, match="has run before; make a new one"):
        scheduler.add(first)
    add(scheduler, "a", 2)


# What is refused.


@pytest.mark.parametrize(
    ("options", "prompt", "new", "message"),
    [
        ({}, 0, 5, "0 prompt tokens and max_new_tokens 5; a request has 1 or more of each"),
        ({}, 5, 0, "5 prompt tokens and max_new_tokens 0"),
        ({}, 5, -1, "max_new_tokens -1"),
        ({"max_len": 10}, 6, 5, "6 prompt tokens and up to 5 new ones are more than max_len 10"),
        ({"policy": "static", "token_budget": 5}, 6, 1, "read 6 tokens in one step, and the budget is 5"),
        ({"policy": "continuous", "token_budget": 8}, 5, 5, "read 9 tokens in one step, and the budget is 8"),
    ],
)
def test_requests_that_can_never_be_served_are_refused_with_the_reason(
    options: dict[str, object], prompt: int, new: int, message: str
) -> None:
    scheduler = scheduler_of(**options)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match=rf"request 'a' is refused: .*{message}"):
        add(scheduler, "a", prompt, new)
    assert scheduler.unfinished == scheduler.n_waiting == 0


def test_impossible_request_hangs_not_but_is_refused_at_admission() -> None:
    """vllm 35541: 9 tokens, 2 blocks of 4."""
    for policy in Policy:
        scheduler = scheduler_of(n_blocks=2, policy=policy)
        with pytest.raises(RequestRefused, match=r"may come to 9 tokens, 3 blocks of 4, and the pool has 2"):
            add(scheduler, "a", 5, 5)
        add(scheduler, "b", 5, 4)  # 8 tokens: the last one of an answer is never fed
        list(until_done(scheduler))


def test_limits_are_served_to_the_last_token() -> None:
    scheduler = scheduler_of(max_len=10)
    a = add(scheduler, "a", 5, 5)
    list(until_done(scheduler))
    assert a.num_tokens == 10
    scheduler = scheduler_of(policy="continuous", token_budget=9)
    add(scheduler, "a", 5, 5)
    list(until_done(scheduler))


def test_a_queue_that_is_full_refuses_for_now() -> None:
    scheduler = scheduler_of(max_waiting=2, max_running=1)
    for id in "ab":
        add(scheduler, id, 3)
    with pytest.raises(RequestRefused, match="2 requests wait already, max_waiting is 2; try again later"):
        add(scheduler, "c", 3)
    advance(scheduler)
    add(scheduler, "c", 3)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", ["token_budget", "max_running", "max_len", "max_waiting"])
def test_numbers_below_1_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be 1 or more"):
        scheduler_of(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("ageing", [-1.0, float("nan")])
def test_negative_ageing_is_refused(ageing: float) -> None:
    with pytest.raises(ConfigError, match="ageing is"):
        scheduler_of(ageing=ageing)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="policy is 'greedy'; it must be one of static, continuous, chunked"):
        scheduler_of(policy="greedy")
    with pytest.raises(ConfigError, match="order is 'lifo'; it must be one of fcfs, shortest"):
        scheduler_of(order="lifo")
    assert scheduler_of(policy=Policy.STATIC, order=Order.SHORTEST).policy is Policy.STATIC
