"""vLLM, started once and asked for a measurement every round; run by the interpreter of a vLLM environment.

Reads one job as JSON from its first argument. Every line on standard input asks for one round, whose figures are the
answer, one line of JSON. Requests go to the engine as token ids and come back as token ids: no server, no tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from random import Random
from time import perf_counter
from typing import Any

Figures = dict[str, Any]


class Engine:
    """vLLM's offline engine, stepped by hand, so that the moment of each token is known.

    Args:
        job: ``folder`` and ``vocab`` of the model, ``max_len`` of a request, and ``batch``.
    """

    def __init__(self, job: Figures) -> None:
        from vllm import LLM

        self._engine = LLM(
            model=job["folder"],
            dtype="bfloat16",
            max_model_len=job["max_len"],
            max_num_seqs=job["batch"],
            enable_prefix_caching=False,
        ).llm_engine
        self._ids, self._dice, self._vocab = count(), Random(0), job["vocab"]

    def measure(self, case: Figures) -> Figures:
        """Answer equal requests, all sent at once, and say what it took.

        Args:
            case: prompt, new, batch.
        """
        from vllm import SamplingParams

        rows, new = case["batch"], case["new"]
        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [[self._dice.randrange(self._vocab) for _ in range(case["prompt"])] for _ in range(rows)]
        have: dict[str, int] = {}
        start = perf_counter()
        for prompt in prompts:
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, greedy)
        first: float | None = None
        early, now = 0, start
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = perf_counter()
            have.update({one.request_id: len(one.outputs[0].token_ids) for one in outputs})
            if first is None and len(have) == rows:  # every row has its first token, some may have more
                first, early = now, sum(have.values())
        assert first is not None
        # Seconds of a step with all rows: the tokens after that moment, at their rate.
        later = sum(have.values()) - early
        return {
            "ttft_s": first - start,
            "tpot_s": (now - first) * rows / later if later else None,
            "e2e_s": now - start,
        }


def main() -> None:
    """Answer every line of standard input with a round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine logs to standard output
    job = json.loads(sys.argv[1])
    begun = perf_counter()
    engine = Engine(job)
    loaded = perf_counter() - begun
    first_call: float | None = None
    for _ in sys.stdin:
        # Warmed up every time: memory that nobody touched for minutes can be slow at its first touch.
        for case in job["cases"]:
            begun = perf_counter()
            engine.measure(case | {"new": min(case["new"], 3)})
            first_call = first_call or perf_counter() - begun
        found = {case["name"]: engine.measure(case) for case in job["cases"]}
        answer = {"load_s": loaded, "first_call_s": first_call, "cases": found, "versions": versions()}
        print(json.dumps(answer), file=answers, flush=True)


def versions() -> dict[str, str]:
    """Of the engine and of torch under it."""
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main()
