"""Plans that are simulated, as JSON: run as a process, where no type is checked at every call of a simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvlab.operate.plan import CapacityPlan, Deployment, Goal, plan
from kvlab.operate.sizing import instance
from kvlab.operate.traffic import judged, lane, load
from kvlab.serving import simulate, workload

CHAT = Goal(prompt_tokens=1000, output_tokens=200, rate=30, ttft=0.5, tpot=0.02)
SHORT = Goal(prompt_tokens=200, output_tokens=20, rate=1000, ttft=0.3, tpot=0.02)
EIGHT = Deployment(model="llama-3.1-8b", hardware="h100-sxm")
SEVENTY = Deployment(model="llama-3.1-70b", hardware="h100-sxm")


def planned(found: CapacityPlan) -> dict[str, Any]:
    emitted = {form: found.emit(form) for form in ("vllm", "ray")} if found.load else {}
    return found.report() | {"emitted": emitted}


def chat() -> dict[str, Any]:
    said: list[str] = []
    found = plan(replace(EIGHT, price_per_hour=3.6), replace(CHAT, rate=100), said.append)
    assert found.replica is not None
    again = simulate(lane(found.replica), workload("fixed:1000/200"), rate=100, requests=900, replicas=3)
    report = again.report(ttft=0.5, tpot=0.02)
    return planned(found) | {"said": said, "again": report["goodput_per_s"] / report["requests_per_s"]}


def alike() -> dict[str, Any]:
    """One replica of three, and three that are all simulated."""
    replica, goal = instance(EIGHT, 1, 1), replace(SHORT, rate=300)
    everybody = simulate(lane(replica), workload("fixed:200/20"), rate=300, requests=4500, replicas=3).report()
    return {"one": load(replica, goal, 3, length=5).figures, "all": everybody}


def crowded() -> dict[str, Any]:
    """Two cards beside Llama-3-70B: as many requests as the pool holds, and as many as vLLM's default."""
    asked = replace(SEVENTY, model="llama-3-70b", gpus=2)
    found = plan(asked, Goal(prompt_tokens=1000, output_tokens=200, rate=2, ttft=4))
    assert found.replica is not None
    crowd = replace(found.goal, rate=6)
    careless = load(replace(found.replica, max_num_seqs=1024), crowd, 1)
    return {
        "max_num_seqs": found.replica.max_num_seqs,
        "planned": found.report()["planned"]["preemptions"],
        "capped": load(found.replica, crowd, 1).figures["preemptions"],
        "careless": careless.figures["preemptions"],
    }


def few() -> dict[str, Any]:
    """One card where the rate needs more."""
    found = plan(replace(EIGHT, gpus=1), SHORT)
    assert found.replica is not None
    assert found.reachable_rate is not None
    kept = [load(found.replica, replace(SHORT, rate=by * found.reachable_rate), 1, 3).kept for by in (1, 1.1)]
    return planned(found) | {"kept": kept}


def free() -> dict[str, Any]:
    """No promise: one replica is not enough, and the plan has the fewest that keep up."""
    goal = replace(SHORT, ttft=None, tpot=None, rate=300)
    replica = instance(EIGHT, 1, 1)
    return planned(plan(EIGHT, goal)) | {"alone": load(replica, judged(replica, goal), 1).kept}


def kinds() -> list[dict[str, Any]]:
    """Experts, latents, windows, old cards."""
    goal = Goal(prompt_tokens=200, output_tokens=10, rate=1)
    cards = {
        "qwen3-30b-a3b": "h100-sxm", "deepseek-v3": "h200-sxm", "gemma-3-4b": "l4", "gpt-2-xl": "t4",
        "falcon-7b": "v100-sxm",
    }  # fmt: skip
    return [planned(plan(Deployment(model=model, hardware=card), goal)) for model, card in cards.items()]


def pipeline() -> dict[str, Any]:
    goal = Goal(prompt_tokens=1000, output_tokens=100, rate=2, ttft=2, tpot=0.1)
    found = plan(replace(SEVENTY, model="llama-3.1-405b"), goal)
    assert found.replica is not None
    assert found.replica.pool is not None
    part = lane(found.replica)
    return planned(found) | {"lane": [part.blocks, part.max_running], "seqs": found.replica.max_num_seqs}


def pools() -> dict[str, Any]:
    """Pairs of A100: prompts of 512 tokens every 16 ms, 14.5 ms a token promised."""
    goal = Goal(prompt_tokens=512, output_tokens=64, rate=60, ttft=0.4, tpot=0.0145)
    return planned(plan(Deployment(model="llama-2-13b", hardware="a100-80gb"), goal))


def seventy() -> dict[str, Any]:
    goal = Goal(prompt_tokens=1000, output_tokens=200, rate=20, ttft=1, tpot=0.05)
    return planned(plan(SEVENTY, goal))


if __name__ == "__main__":
    cases = (chat, alike, crowded, few, free, kinds, pipeline, pools, seventy)
    print(json.dumps({case.__name__: case() for case in cases}))
