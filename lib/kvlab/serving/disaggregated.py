"""Two pools instead of one: some replicas read prompts, others decode, and caches move between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import count

from kvlab.cost import transfer_seconds
from kvlab.errors import at_least
from kvlab.serving.log import Lifetime, Summary
from kvlab.serving.request import Request
from kvlab.serving.simulate import Replica, SimulatedRequest
from kvlab.serving.workload import Arrival, Workload, arrivals


class Handover(Summary):
    """What a prefill replica did, and when the cache of each request that goes on has arrived at the decode pool.

    Caches leave one after another, over one link of the replica, once the first token is there. A request whose answer
    is that one token ends here.

    Args:
        seconds_to_move: how long the cache of a prompt of so many tokens takes.
        goes_on: whether an answer has more tokens.
    """

    def __init__(self, seconds_to_move: Callable[[int], float], goes_on: Callable[[Arrival], bool]) -> None:
        super().__init__()
        self._seconds_to_move, self._goes_on, self._free_at = seconds_to_move, goes_on, 0.0
        #: When each cache has arrived, whose it is, and the request's times so far.
        self.arrived: list[tuple[float, SimulatedRequest, Lifetime]] = []

    def ended(self, request: Request, life: Lifetime) -> None:
        """Send it on, or keep its figures."""
        assert isinstance(request, SimulatedRequest)
        if not self._goes_on(request.arrival):
            super().ended(request, life)
            return
        self._free_at = max(self._free_at, life.last) + self._seconds_to_move(request.prompt_tokens)
        self.arrived.append((self._free_at, request, life))


def simulate_disaggregated(
    prefill: Replica,
    decode: Replica,
    workload: Workload,
    *,
    rate: float,
    requests: int,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    bytes_per_second: float,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Serve a workload by two pools: one reads prompts, the other decodes, and caches move between them.

    DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677): neither phase disturbs the other, at the price of
    moving every cache, and of machines that can do only one of the two. A request gets its first token from the prefill
    pool; its second one waits for the move and for room in the decode pool, and that wait is its first ITL. What the
    decode pool could never hold is refused before it is read.

    Args:
        prefill: each replica of the first pool.
        decode: each replica of the second. Its ``max_new_tokens`` is the cap of the answers.
        workload: what is asked for.
        rate: requests per second.
        requests: how many are sent.
        prefill_replicas: of the first pool.
        decode_replicas: of the second.
        bytes_per_second: of the link of each prefill replica.
        seed: of everything that is drawn.
        tell: called with how far it has come.

    Returns:
        What users saw. Steps are those of both pools together, and so are the means of what was held and who ran.

    Raises:
        ConfigError: a number is impossible.
    """
    move = partial(_move_seconds, prefill, bytes_per_second)
    move(1)  # which checks the link
    at_least(1, "decode_replicas", decode_replicas)
    at_least(1, "prefill_replicas", prefill_replicas)
    total = Summary()
    coming = arrivals(workload, rate=rate, requests=at_least(1, "requests", requests), seed=seed)
    arrived = list[tuple[float, SimulatedRequest, Lifetime]]()
    for done, share in enumerate(_dealt(decode, coming, prefill_replicas, total), start=1):
        handover = Handover(move, lambda arrival: decode.answer_tokens(arrival) > 1)
        prefill.serve(share, handover)
        arrived += handover.arrived
        total.merge(handover)
        tell(f"{done} of {prefill_replicas} prefill replicas")
    arrived.sort(key=lambda each: each[0])
    for index in range(decode_replicas):
        total.merge(_decode_share(decode, arrived[index::decode_replicas]))
        tell(f"{index + 1} of {decode_replicas} decode replicas")
    return total


def _dealt(
    decode: Replica, coming: Iterable[Arrival], prefill_replicas: int, total: Summary
) -> list[list[tuple[float, Request]]]:
    """Requests for each prefill replica; those that the decode pool could never hold are refused."""
    dealt: list[list[tuple[float, Request]]] = [[] for _ in range(prefill_replicas)]
    door, numbers = decode.engine().scheduler, count()
    for arrival in coming:
        if decode.answer_tokens(arrival) > 1 and (reason := door.refusal(_moved(decode, 0, arrival))):
            total.refuse(reason)
        else:
            request = SimulatedRequest.of(next(numbers), arrival, 1)
            dealt[arrival.session % prefill_replicas].append((arrival.time, request))
    return dealt


def _move_seconds(prefill: Replica, bytes_per_second: float, tokens: int) -> float:
    return transfer_seconds(prefill.model, tokens, bytes_per_second, prefill.kv or prefill.dtype)


def _moved(decode: Replica, id: Hashable, arrival: Arrival) -> SimulatedRequest:
    """A request as the decode pool sees it: its first token is known, and the cache of all before it comes along."""
    left = decode.answer_tokens(arrival) - 1
    cap = (decode.max_new_tokens or arrival.output_tokens) - 1
    request = SimulatedRequest(id, arrival.prompt_tokens + 1, cap, arrival=arrival, output_tokens=left)
    request.brought = arrival.prompt_tokens
    return request


def _decode_share(decode: Replica, arrived: Sequence[tuple[float, SimulatedRequest, Lifetime]]) -> Summary:
    """What one decode replica did, with the caches that arrived there in order."""
    summary, coming = Summary(), list[tuple[float, Request]]()
    for time, request, life in arrived:
        moved = _moved(decode, request.id, request.arrival)
        summary.expect(moved, life)
        coming.append((time, moved))
    decode.serve(coming, summary)
    return summary
