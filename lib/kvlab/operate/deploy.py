"""What to start a plan with: ``vllm serve`` commands, a Ray Serve LLM application, a Kubernetes manifest.

Everything is text that the reader starts; nothing is started here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pprint import pformat
from shlex import quote
from typing import TYPE_CHECKING, Any

from kvlab.cost import weight_bytes
from kvlab.errors import ConfigError
from kvlab.operate.goal import Goal
from kvlab.operate.sizing import Instance
from kvlab.operate.vllm import (
    PUBLISHED,
    Flag,
    default_max_num_seqs,
    default_token_budget,
    kv_cache_dtype,
    quantization,
)

if TYPE_CHECKING:
    from kvlab.operate.traffic import Split

#: The official image of the release whose flags these are.
_IMAGE = "vllm/vllm-openai:v0.32.0"

#: Bytes per second at which weights come from a network disk, and seconds to compile and to capture graphs: what a
#: start may take before Kubernetes gives up on it. Both are generous assumptions.
_LOAD_BYTES_PER_S, _WARM_UP_S = 200e6, 300

#: What Ray calls the cards (``ray.util.accelerators``); others are left to its scheduler.
_RAY_NAMES = {
    "t4": "T4", "v100-sxm": "V100", "l4": "L4", "a10g": "A10G", "a100-40gb": "A100", "a100-80gb": "A100",
    "h100-pcie": "H100", "h100-sxm": "H100", "h200-sxm": "H200", "b200-sxm": "B200",
    "mi300x": "AMD-Instinct-MI300X-OAM",
}  # fmt: skip

#: Moves caches between servers over UCX. Its role is a placeholder: the proxy before the servers decides who does what.
_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, kw_only=True)
class Server:
    """What is to be started.

    Args:
        replica: one copy of the model.
        replicas: how many of them.
        model_id: what the server loads.
        goal: what was asked for.
        max_model_len: tokens of the longest request that it takes.
        batch_in_memory: requests of the goal that fit at once.
        running: requests that run on one replica, on average.
        split: into replicas that read prompts and others that decode, where that pays.
    """

    replica: Instance
    replicas: int
    model_id: str
    goal: Goal
    max_model_len: int
    batch_in_memory: int
    running: float
    split: Split | None = None

    @property
    def data_parallel(self) -> int:
        """Copies that one ``vllm serve`` runs on one machine, behind one address.

        Experts of several copies wait for each other in every step, so such models get servers of their own; and so do
        replicas that need more than one machine.
        """
        asked, replica = self.replica.deployment, self.replica
        if asked.config.moe is not None or replica.cards > asked.gpus_per_node:
            return 1
        servers = ceil(self.replicas / (asked.gpus_per_node // replica.cards))
        return ceil(self.replicas / servers)

    @property
    def servers(self) -> int:
        """Processes of ``vllm serve`` that make up all replicas."""
        return ceil(self.replicas / self.data_parallel)

    @property
    def engine_flags(self) -> list[Flag]:
        """The flags of one copy."""
        return [*self._memory_flags(), *self._batch_flags(), *self._format_flags(), *self._parallel_flags()]

    @property
    def flags(self) -> list[Flag]:
        """The flags of one ``vllm serve``."""
        if self.data_parallel == 1:
            return self.engine_flags
        why = f"{self.data_parallel} copies on one machine, behind one address"
        return [*self.engine_flags, Flag("--data-parallel-size", str(self.data_parallel), why)]

    def _memory_flags(self) -> list[Flag]:
        goal, asked, pool = self.goal, self.replica.deployment, self.replica.pool
        assert pool is not None
        return [
            Flag(
                "--max-model-len", str(self.max_model_len),
                f"{goal.prompt_tokens} + {goal.output_tokens} tokens and room; the KV pool holds {pool.tokens:,}",
            ),
            Flag(
                "--gpu-memory-utilization", f"{asked.utilization:g}",
                "the part of each card that the plan counts with; what it leaves is for CUDA graphs",
            ),
        ]  # fmt: skip

    def _batch_flags(self) -> list[Flag]:
        replica, card, goal = self.replica, self.replica.deployment.card, self.goal
        if replica.max_num_seqs == default_max_num_seqs(card):
            seqs = "the default; memory and the promised TPOT allow it"
        elif replica.max_num_seqs == self.batch_in_memory:
            seqs = f"so many requests of {goal.tokens} tokens fit the KV pool; more would be preempted"
        else:
            seqs = "a step of more decodes takes longer than the promised TPOT"
        budget = "the default for this card" if replica.token_budget == default_token_budget(card) else (
            "below the default: the simulation needs fewer replicas with smaller pieces of prompts"
        )  # fmt: skip
        return [
            Flag("--max-num-seqs", str(replica.max_num_seqs), seqs),
            Flag("--max-num-batched-tokens", str(replica.token_budget), budget),
        ]

    def _format_flags(self) -> list[Flag]:
        asked, flags = self.replica.deployment, list[Flag]()
        method = quantization(asked.weight_format)
        if method and PUBLISHED.get(asked.config.name) != asked.weight_format:
            why = "makes it while loading a 16-bit checkpoint; leave it out where the checkpoint is quantized already"
            flags.append(Flag("--quantization", method, why))
        if (cache := kv_cache_dtype(asked.kv_format)) != "auto":
            flags.append(Flag("--kv-cache-dtype", cache, "the format that the KV pool was counted with"))
        return flags

    def _parallel_flags(self) -> list[Flag]:
        replica, flags = self.replica, list[Flag]()
        if replica.tensor_parallel > 1:
            weights = replica.ledger.weights / 1e9
            why = f"every matrix is shared; {weights:.1f} GB of weights a card"
            flags.append(Flag("--tensor-parallel-size", str(replica.tensor_parallel), why))
        if replica.pipeline_parallel > 1:
            why = "more than the tensor-parallel group holds: stages of layers, one after another"
            flags.append(Flag("--pipeline-parallel-size", str(replica.pipeline_parallel), why))
        if replica.cards > replica.deployment.gpus_per_node:
            why = "the stages are on several machines, which a Ray cluster joins"
            flags.append(Flag("--distributed-executor-backend", "ray", why))
        return flags


def vllm_command(model: str, flags: list[Flag]) -> str:
    """A command that can be pasted: one flag a line, and nothing after a backslash.

    Args:
        model: what to serve.
        flags: of the server.
    """
    return " \\\n".join([f"vllm serve {quote(model)}", *(f"  {flag.name} {quote(flag.value)}" for flag in flags)])


def emit_vllm(server: Server) -> str:
    """The commands, with comments on lines of their own.

    Args:
        server: what to start.
    """
    lines: list[str] = []
    if server.replica.cards > server.replica.deployment.gpus_per_node:
        machines = ceil(server.replica.cards / server.replica.deployment.gpus_per_node)
        lines += [f"# First join {machines} machines in a Ray cluster (ray start). Run this on its head only."]
    if server.servers > 1:
        lines += [f"# Start this {server.servers} times, on cards of their own, behind a load balancer."]
    lines += [f"# {flag.name}: {flag.why}" for flag in server.flags]
    lines.append(vllm_command(server.model_id, server.flags))
    if server.split:
        lines += ["", *_split_commands(server, server.split)]
    return "\n".join(lines) + "\n"


def _split_commands(server: Server, split: Split) -> list[str]:
    """Two kinds of servers instead, and what goes before them."""
    transfer = Flag("--kv-transfer-config", json.dumps(_TRANSFER), "caches move over the network")
    command = vllm_command(server.model_id, [*server.engine_flags, transfer])
    return [
        f"# Or, with one replica less: {split.prefill} servers that read prompts and {split.decode} that decode.",
        "# All have this command (pip install nixl); a proxy sends each request to one of the first with max_tokens 1,",
        "# and then to one of the second with the kv_transfer_params of that answer.",
        command,
    ]


def emit_ray(server: Server) -> str:
    """A Ray Serve LLM application (``ray.serve.llm``).

    Args:
        server: what to start.
    """
    head = "from ray import serve\nfrom ray.serve.llm import LLMConfig, "
    if server.split:
        transfer = {"kv_transfer_config": _TRANSFER}
        sides = {"prefill_config": server.split.prefill, "decode_config": server.split.decode}
        configs = "".join(f"{name} = {_llm_config(server, count, transfer)}\n" for name, count in sides.items())
        app = 'build_pd_openai_app({"prefill_config": prefill_config, "decode_config": decode_config})'
        return f"{head}build_pd_openai_app\n\n{configs}app = {app}\nserve.run(app, blocking=True)\n"
    config = f"llm_config = {_llm_config(server, server.replicas, {})}\n"
    app = 'build_openai_app({"llm_configs": [llm_config]})'
    return f"{head}build_openai_app\n\n{config}app = {app}\nserve.run(app, blocking=True)\n"


def _llm_config(server: Server, replicas: int, extra: Mapping[str, Any]) -> str:
    name = server.replica.deployment.config.name
    # Ray places the workers itself, in the placement group of the replica.
    flags = [flag for flag in server.engine_flags if flag.name != "--distributed-executor-backend"]
    kwargs = {flag.name.removeprefix("--").replace("-", "_"): _value(flag.value) for flag in flags}
    fields: dict[str, Any] = {"model_loading_config": {"model_id": name, "model_source": server.model_id}}
    if card := _RAY_NAMES.get(server.replica.deployment.card.name):
        fields["accelerator_type"] = card
    scaling = {
        "min_replicas": replicas, "max_replicas": 2 * replicas,
        "target_ongoing_requests": max(ceil(server.running), 1),
    }  # fmt: skip
    fields["deployment_config"] = {"autoscaling_config": scaling}
    fields["engine_kwargs"] = {**kwargs, **extra}
    lines = (f"    {key}={_indented(value)},\n" for key, value in fields.items())
    return f"LLMConfig(\n{''.join(lines)})"


def _indented(value: object) -> str:
    return pformat(value, width=100, sort_dicts=False).replace("\n", "\n    ")


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def emit_k8s(server: Server) -> str:
    """A Deployment with a pod for each replica, and the Service before it.

    Args:
        server: what to start.

    Raises:
        ConfigError: a replica needs more than one machine, or the cards are not NVIDIA's.
    """
    replica, asked = server.replica, server.replica.deployment
    if replica.cards > asked.gpus_per_node:
        raise ConfigError(
            f"a replica of {replica.cards} cards is more than one pod on one machine of {asked.gpus_per_node}; "
            "use --emit ray on KubeRay, or a LeaderWorkerSet"
        )
    if asked.card.name.startswith("mi"):
        raise ConfigError(f"the manifest is for NVIDIA cards, and this is {asked.card.title}; use --emit vllm")
    name = "vllm-" + "".join(letter if letter.isalnum() else "-" for letter in asked.config.name.lower()).strip("-")
    notes = [
        f"# Replicas: {server.replicas}, cards of each: {replica.cards}. The image is the release of these flags.",
        "# Scale on vllm:num_requests_waiting (an HPA with the Prometheus adapter): a GPU looks busy at any load.",
        "# The Service deals connections out at random; a gateway that looks at queues gets closer to the plan.",
    ]
    documents = [_yaml(_deployment(server, name)), _yaml(_service(name))]
    return "\n".join(notes) + "\n" + "\n---\n".join(documents) + "\n"


def _deployment(server: Server, name: str) -> dict[str, Any]:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": server.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(server)},
        },
    }


def _pod(server: Server) -> dict[str, Any]:
    replica, asked = server.replica, server.replica.deployment
    start_s = _WARM_UP_S + weight_bytes(asked.config, asked.weight_format) / _LOAD_BYTES_PER_S
    health = {"httpGet": {"path": "/health", "port": 8000}}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": _IMAGE,
        "command": ["vllm", "serve", server.model_id],
        "args": [f"{flag.name}={flag.value}" for flag in server.engine_flags],
        "ports": [{"name": "http", "containerPort": 8000}],
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}},
            }
        ],
        "resources": {"limits": {"nvidia.com/gpu": replica.cards}},
        # Until the first success the other two probes rest: a start that loads and compiles is not an illness.
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": ceil(start_s / 10)},
        "readinessProbe": {**health, "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3},
    }
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": 120, "containers": [container]}
    if replica.cards > 1:
        # Workers of one replica talk through shared memory, and the default of a container is 64 MiB.
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}]
    return pod


def _service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"selector": {"app": name}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }


def _yaml(value: object, indent: int = 0) -> str:
    """Maps and lists in block style, everything else as JSON, which is YAML."""
    space = "  " * indent
    if isinstance(value, Mapping):
        return "\n".join(f"{space}{key}:{_below(each, indent + 1)}" for key, each in value.items())
    if isinstance(value, list):
        return "\n".join(f"{space}- {_yaml(each, indent + 1).lstrip()}" for each in value)
    return f"{space}{json.dumps(value)}"


def _below(value: object, indent: int) -> str:
    return f"\n{_yaml(value, indent)}" if isinstance(value, Mapping | list) else f" {json.dumps(value)}"


#: How each form is made.
EMITTERS: Mapping[str, Callable[[Server], str]] = {"vllm": emit_vllm, "ray": emit_ray, "k8s": emit_k8s}
