"""Labs: something goes wrong with a server, is diagnosed, and is cured.

    outcome = run_lab(lab("leaking-cache"))
    print(outcome.before.diagnosis.verdict)
    print(outcome.readings())

Each is an engine of this library that serves Llama-3-8B on an H100 (a cost model on a virtual clock: about a second of
ours), with one fault or one wrong setting, under a load test. What the user complains of is the symptom; the tool of
:mod:`kvlab.operate.diagnose` reads the metrics page before and after the load, and the result of the load test; the
remedy is applied, and everything is done once more. All is seeded: the figures are the same every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvlab.config import shape_of
from kvlab.errors import ConfigError, nearest
from kvlab.operate.causes import cause
from kvlab.operate.client import facts_of_loadtest
from kvlab.operate.diagnose import Diagnosis, diagnose
from kvlab.operate.engine_server import EngineServer
from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.facts import Facts, facts, together, with_hardware
from kvlab.operate.faults import (
    BufferingProxy,
    BusyClient,
    ColdStart,
    EngineFault,
    Handler,
    HostOverhead,
    LeakyPool,
    PathFault,
    SlowReader,
)
from kvlab.operate.in_process import InProcess
from kvlab.operate.loadtest import run
from kvlab.operate.prometheus import read_page
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load
from kvlab.operate.virtual_time import run_virtually
from kvlab.serving import Replica
from kvlab.timing import percentile

_MODEL, _HARDWARE = "llama-3-8b", "h100-sxm"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A server, what is wrong with it, and what is asked of it.

    Args:
        server: its settings.
        load: the load test.
        earlier: what the server has served before anybody looked.
        engine: faults of its engine.
        path: faults between it and its client, the nearest to the server first.
    """

    server: Replica
    load: Load
    earlier: Load | None = None
    engine: tuple[EngineFault, ...] = ()
    path: tuple[PathFault, ...] = ()


@dataclass(frozen=True)
class Observed:
    """What there was to see.

    Args:
        scene: that was played.
        result: of the load test.
        pages: the metrics page before the load and after it.
        facts: from both.
    """

    scene: Scene
    result: LoadTestResult
    pages: tuple[str, str]
    facts: Facts

    @property
    def diagnosis(self) -> Diagnosis:
        """What the tool says."""
        return diagnose(self.facts)

    def reading(self, name: str) -> float:
        """One figure; latencies in seconds, 0 where there is none.

        Args:
            name: of a figure of :meth:`LoadTestResult.report`, for latencies with what of it, as in ``ttft_s.p99``;
                ``pause_s``, the longest gap within an answer, of the median answer; or one of the server's facts:
                ``hit_rate``, ``preemptions``.
        """
        if name == "pause_s":
            return percentile([max(record.itl) for record in self.result.completed if record.itl] or [0.0], 50)
        if name in ("hit_rate", "preemptions"):
            return float(getattr(self.facts, name) or 0.0)
        figure, _, part = name.partition(".")
        found: Any = self.result.report()[figure]
        return float((found[part] if part else found) if found else 0.0)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Something that goes wrong, and its cure.

    Args:
        name: to call it by.
        symptom: what the user complains of.
        question: to the reader, before the answer.
        cause: id of what is to be found; see :data:`kvlab.operate.causes.CAUSES`.
        remedy: what is changed.
        price: what the remedy costs; empty where it costs nothing.
        shows: readings that show symptom and cure, see :meth:`Observed.reading`; the first one most clearly.
        before: with the fault.
        cure: what the remedy changes of it: fields of :class:`Scene`.
    """

    name: str
    symptom: str
    question: str
    cause: str
    remedy: str
    price: str = ""
    shows: tuple[str, ...]
    before: Scene
    cure: Mapping[str, Any]

    @property
    def after(self) -> Scene:
        """The scene with the remedy."""
        return replace(self.before, **self.cure)

    @property
    def chapter(self) -> str:
        """The chapter of the book that explains the cause."""
        return cause(self.cause).chapter


@dataclass(frozen=True)
class Outcome:
    """What a lab showed.

    Args:
        lab: that was run.
        before: the symptom.
        after: the cure.
    """

    lab: Lab
    before: Observed
    after: Observed

    def readings(self) -> dict[str, tuple[float, float]]:
        """The figures that show it, before and after."""
        return {name: (self.before.reading(name), self.after.reading(name)) for name in self.lab.shows}


def run_lab(lab: Lab) -> Outcome:
    """Play both scenes of a lab.

    Args:
        lab: one of ``LABS``, or of your own.
    """
    return Outcome(lab, observe(lab.before), observe(lab.after))


def observe(scene: Scene) -> Observed:
    """Play a scene and diagnose it, in virtual time; also where an event loop runs already, as in a notebook.

    Args:
        scene: a server and a load.
    """
    return run_virtually(_play(scene))


async def _play(scene: Scene) -> Observed:
    engine, model = scene.server.engine(), shape_of(scene.server.model).name
    for fault in scene.engine:
        fault.spoil(engine)
    target = Target("http://lab", model, dialect=Dialect(token_ids=True))
    async with EngineServer(engine, model) as server:
        if scene.earlier is not None:
            await run(target, scene.earlier, transport=InProcess(server.answer))
        before = server.page()
        answer: Handler = server.answer
        for way in scene.path:
            answer = way.between(answer)
        result = await run(target, scene.load, transport=InProcess(answer))
        after = server.page()
    return Observed(scene, result, (before, after), _known(scene, result, before, after))


def _known(scene: Scene, result: LoadTestResult, before: str, after: str) -> Facts:
    seen = facts(read_page(before), read_page(after), result.seconds)
    seen = together(seen, facts_of_loadtest(result.to_json()))
    model, hardware = scene.server.model, scene.server.hardware
    if isinstance(model, str) and isinstance(hardware, str) and seen.batch:
        return with_hardware(seen, model, hardware)
    return seen


def lab(name: str) -> Lab:
    """A lab by its name.

    Args:
        name: of one of ``LABS``.

    Raises:
        ConfigError: there is none of this name.
    """
    found = next((each for each in LABS if each.name == name), None)
    if found is None:
        raise ConfigError(f"no lab is called {name!r}; {nearest(name, (each.name for each in LABS))}")
    return found


def _server(**settings: Any) -> Replica:
    return Replica(**{"model": _MODEL, "hardware": _HARDWARE, **settings})


def _load(workload: str, requests: int, **settings: Any) -> Load:
    return Load(workload=workload, requests=requests, warmup=0, **settings)


LABS: tuple[Lab, ...] = (
    Lab(
        name="queue",
        symptom="The first token is late, and the later the longer the rush lasts; after it every answer runs fast.",
        question="18 requests come a second, each takes 0.3 s, and 4 may run at once. Who waits how long?",
        cause="queueing",
        remedy="More seats (--max-num-seqs): the card was far from busy, and each step now serves more.",
        shows=("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "output_tokens_per_s"),
        before=Scene(server=_server(max_running=4), load=_load("fixed:256/64", 50, rate=18)),
        cure={"server": _server()},
    ),
    Lab(
        name="long-prompt",
        symptom="The first token takes long even when nobody else is there.",
        question="A prompt is made ten times shorter. How much earlier comes the first token, and how much the last?",
        cause="long-prefill",
        remedy="A shorter prompt: 700 tokens instead of 7,000.",
        price="What was left out of the prompt.",
        shows=("ttft_s.p50", "e2e_s.p50", "tpot_s.p50"),
        before=Scene(server=_server(), load=_load("fixed:7000/48", 20, rate=1)),
        cure={"load": _load("fixed:700/48", 20, rate=1)},
    ),
    Lab(
        name="burst",
        symptom="Some requests are refused (503), and those that are not wait long for their first token.",
        question="4 requests of 3,000 tokens come a second, in bursts, and 4 may wait. Who is turned away?",
        cause="admission-limit",
        remedy="Clients spread their requests, and come back after growing pauses: the same rate without its bursts.",
        price="Whoever came in a burst waits at home instead.",
        shows=("failed", "completed", "ttft_s.p50"),
        before=Scene(
            server=_server(max_waiting=4, max_running=8),
            load=_load("fixed:3000/48", 48, rate=4, burstiness=5),
        ),
        cure={"load": _load("fixed:3000/48", 48, rate=4, burstiness=0.3)},
    ),
    Lab(
        name="stutter",
        symptom="Answers stutter: their text stands still for a moment again and again.",
        question="A step may hold 8,192 tokens. What becomes of the others while it reads a prompt of 6,000?",
        cause="prefill-interference",
        remedy="A smaller token budget of a step (--max-num-batched-tokens 512): prompts are read in pieces.",
        price="First tokens of long prompts come later.",
        shows=("pause_s", "itl_s.max", "itl_s.p99", "ttft_s.p50"),
        before=Scene(server=_server(token_budget=8192), load=_load("uniform:16-6000/80-160", 32, rate=4)),
        cure={"server": _server(token_budget=512)},
    ),
    Lab(
        name="large-batch",
        symptom="Every token is slow, evenly, since more people use it. Nobody waits for the first one.",
        question="6 ms a token are promised. Alone it takes 4.5; what takes longer with 30 others in the step?",
        cause="decode-batch-growth",
        remedy="Fewer bytes a step: FP8 weights and an FP8 cache. (Fewer seats would keep the promise too, for those "
        "who have one: the others would wait.)",
        price="A little accuracy, which chapter 10 measures.",
        shows=("tpot_s.p50", "goodput_per_s", "output_tokens_per_s"),
        before=Scene(server=_server(), load=_load("shared-prefix", 48, rate=80, slo_tpot=0.006)),
        cure={"server": _server(weights="fp8", kv="fp8")},
    ),
    Lab(
        name="small-pool",
        symptom="Some answers stop in the middle for the better part of a second, while the median looks good.",
        question="24 answers grow in a pool that holds 14 of them at full length. What happens to the youngest?",
        cause="preemption",
        remedy="A larger pool: all the memory that weights and activations leave.",
        shows=("itl_s.max", "ttft_s.p99", "preemptions"),
        before=Scene(server=_server(blocks=400), load=_load("fixed:256/192", 30, concurrency=24)),
        cure={"server": _server()},
    ),
    Lab(
        name="past-the-context",
        symptom="Some requests fail with 400; some answers end in the middle of a sentence.",
        question="The context has 8,192 tokens, prompts have 7,500 to 8,400, and 256 are asked for. Who gets what?",
        cause="context-overflow",
        remedy="Prompts are cut so that the answer fits beside them.",
        price="What was cut.",
        shows=("failed", "completed", "output_tokens_per_s"),
        before=Scene(server=_server(), load=_load("uniform:7500-8400/256-256", 12, rate=0.3)),
        cure={"load": _load("uniform:6900-7900/256-256", 12, rate=0.3)},
    ),
    Lab(
        name="cold-start",
        symptom="The first requests after the start take a second or more; an hour later nobody can say why.",
        question="The first step of each size costs a second. Which requests pay, and how often?",
        cause="cold-start",
        remedy="Warm up with requests of the real shapes before the server gets traffic.",
        price="A start that takes some seconds longer.",
        shows=("ttft_s.max", "ttft_s.p99", "ttft_s.p50"),
        before=Scene(server=_server(), load=_load("fixed:256/48", 40, rate=1), engine=(ColdStart(1.0),)),
        cure={"earlier": _load("uniform:16-512/8-48", 16, concurrency=8)},
    ),
    Lab(
        name="proxy",
        symptom="Text comes in bursts, half a line at once, and its beginning late; the server's own figures are good.",
        question="A proxy collects 4,096 bytes before it passes them on. How many tokens is that, and how long?",
        cause="buffering-proxy",
        remedy="The proxy passes every event on at once (proxy_buffering off).",
        shows=("ttft_s.p50", "pause_s", "itl_s.p50", "tpot_s.p50"),
        before=Scene(server=_server(), load=_load("fixed:256/64", 24, rate=4), path=(BufferingProxy(4096),)),
        cure={"path": ()},
    ),
    Lab(
        name="slow-client",
        symptom="Tokens come slowly at the client; the server is done long before.",
        question="The client stores each token before it reads the next, which takes 12 ms. Who sets the pace?",
        cause="slow-client",
        remedy="The client reads in a loop of its own, and stores elsewhere.",
        shows=("tpot_s.p50", "e2e_s.p50", "ttft_s.p50"),
        before=Scene(server=_server(), load=_load("fixed:256/64", 24, rate=8), path=(SlowReader(0.012),)),
        cure={"path": ()},
    ),
    Lab(
        name="busy-client",
        symptom="The first token is late at the client; the server's own figures are good.",
        question="The client works 45 ms on each request before it sends it, and 15 come a second. Who waits for whom?",
        cause="client-lag",
        remedy="The work is done before, or by others: the loop that sends does nothing else.",
        shows=("ttft_s.p50", "send_lag_s.mean"),
        before=Scene(server=_server(), load=_load("fixed:256/6", 80, rate=15), path=(BusyClient(0.045),)),
        cure={"path": ()},
    ),
    Lab(
        name="leaking-cache",
        symptom="The server gets slower from hour to hour; started again, it is fast.",
        question="Each request leaves ten blocks of the pool behind, of 1,200. What does its user see, and when?",
        cause="prefix-cache-leak",
        remedy="A start, and the repair: every block is given back.",
        shows=("ttft_s.p99", "itl_s.max", "hit_rate", "preemptions"),
        before=Scene(
            server=_server(blocks=1200),
            load=_load("shared-prefix", 32, rate=8),
            earlier=_load("fixed:256/8", 60, rate=20),
            engine=(LeakyPool(10),),
        ),
        cure={"engine": ()},
    ),
    Lab(
        name="slow-host",
        symptom="Every token takes as long with one user as with ten, and nearly eight times what the memory needs.",
        question="A step reads 16 GB at 3.35 TB/s and takes 35 ms. What does the card do in the meantime?",
        cause="host-overhead",
        remedy="Steps are captured and replayed as a whole (no --enforce-eager), and the CPU cores are free.",
        shows=("tpot_s.p50", "ttft_s.p50"),
        before=Scene(server=_server(), load=_load("fixed:256/48", 24, rate=4), engine=(HostOverhead(0.03),)),
        cure={"engine": ()},
    ),
)
