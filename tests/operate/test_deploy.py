"""What a plan is started with: real flags, commands that can be pasted, Python and YAML that can be read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from kvlab.errors import ConfigError
from kvlab.operate.deploy import Server, emit_k8s, emit_ray, emit_vllm
from kvlab.operate.plan import CapacityPlan, Deployment, Goal
from kvlab.operate.sizing import fitting, instance
from kvlab.operate.traffic import Split, Trial
from kvlab.operate.vllm import kv_cache_dtype, quantization, serves

GOAL = Goal(prompt_tokens=800, output_tokens=200, rate=30, ttft=0.5, tpot=0.05)
FLAGS_PAGE = (Path(__file__).parent / "fixtures" / "vllm_flags.md").read_text("utf8")
REAL = set(re.findall(r"--[a-z][a-z0-9-]+", FLAGS_PAGE))
SPLIT = Split(2, 1, 0.999, 0.5, 3)


def server(model: str = "llama-3.1-8b", card: str = "h100-sxm", replicas: int = 3, **asked: Any) -> Server:
    """A server of the smallest replica that fits, without a simulation."""
    split = asked.pop("split", None)
    deployment = Deployment(model=model, hardware=card, **asked)
    replica = fitting(deployment, GOAL)[0]
    load = Trial(replicas, GOAL.rate / replicas, 1.0, {"running_mean": 12.3})
    return CapacityPlan(deployment=deployment, goal=GOAL, replica=replica, load=load, split=split)._server()


SERVERS = [
    server(),
    server(weights="fp8", kv="fp8"),
    server(weights="int8", kv="int8"),
    server(weights="int4", kv="int4"),
    server("llama-3.1-70b", replicas=1),
    server("llama-3.1-405b", replicas=2),
    server("qwen3-30b-a3b", replicas=4),
    server("deepseek-v3", "h200-sxm", weights="fp8"),
    server("gpt-2-small", "t4", replicas=1),
    server(split=SPLIT),
]
each_server = pytest.mark.parametrize("each", SERVERS, ids=lambda found: found.model_id.split("/")[-1])


def commands(text: str) -> list[list[str]]:
    """The words of each command, as a shell gives them to it."""
    script = "vllm() { printf '%s\\n' vllm \"$@\" end; }\n" + text
    done = subprocess.run(["sh", "-eu", "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return [words.split("\n") for words in done.stdout.removesuffix("\nend\n").split("\nend\n")]


@each_server
def test_every_flag_is_one_of_vllm_and_has_a_reason(each: Server) -> None:
    assert {flag.name for flag in each.flags} <= REAL
    assert all(flag.why and "\n" not in flag.why for flag in each.flags)
    assert len({flag.name for flag in each.flags}) == len(each.flags)


def test_names_that_the_page_says_are_gone_are_not_taken_for_real() -> None:
    assert {"--max-model-len", "--kv-transfer-config", "--distributed-executor-backend"} <= REAL
    assert "--max-num-partial-prefills" in FLAGS_PAGE.split("no longer exist")[0]
    assert not {"--swap-space", "--device"} & {flag.name for each in SERVERS for flag in each.flags}


@each_server
def test_a_command_can_be_pasted(each: Server) -> None:
    """The shell reads exactly the flags: nothing stands after a backslash, comments have lines of their own."""
    text = emit_vllm(each)
    assert not re.search(r"\\[^\n]", text)
    assert all(line.startswith("#") or "#" not in line for line in text.splitlines())
    first, *others = commands(text)
    assert first == ["vllm", "serve", each.model_id, *(word for flag in each.flags for word in (flag.name, flag.value))]
    assert bool(others) == (each.split is not None)


def test_formats_are_named_for_what_they_are() -> None:
    """B21: `--quantization awq` makes nothing. A checkpoint says its format itself; only online methods are a flag."""
    assert [quantization(form) for form in ("bfloat16", "float16", "int4")] == [None, None, None]
    assert [quantization(form) for form in ("fp8", "int8")] == ["fp8_per_tensor", "int8_per_channel_weight_only"]
    online = FLAGS_PAGE.split("online (quantise a 16-bit checkpoint at load):")[1].split(";")[0]
    assert all(str(quantization(form)) in online for form in ("fp8", "int8"))
    caches = FLAGS_PAGE.split("`--kv-cache-dtype` | auto |")[1].split("\n")[0]
    assert all(kv_cache_dtype(form) in caches for form in ("bfloat16", "fp8", "int8", "int4"))
    assert "--quantization" not in {flag.name for flag in server("deepseek-v3", "h200-sxm", weights="fp8").flags}
    assert server(weights="int4").model_id == "YOUR-AWQ-OR-GPTQ-CHECKPOINT"
    for refused in (quantization, kv_cache_dtype):
        with pytest.raises(ConfigError, match=r"vLLM 0\.32 has no q4_1"):
            refused("q4_1")


def test_the_longest_request_is_a_power_of_two_that_fits() -> None:
    assert server().max_model_len == 1024
    assert server(max_model_len=1200).max_model_len == 1200
    tight = Deployment(model="llama-3-70b", hardware="h100-sxm", gpus=2)
    replica = fitting(tight, replace(GOAL, prompt_tokens=4000))[0]
    plan = CapacityPlan(deployment=tight, goal=replace(GOAL, prompt_tokens=7900), replica=replica)
    assert plan.max_model_len == 8192


def test_copies_share_a_machine_but_not_experts() -> None:
    """10 copies of 1 card: two machines with 5 each. Copies of a model with experts are not independent."""
    ten = server(replicas=10)
    assert (ten.data_parallel, ten.servers) == (5, 2)
    assert "Start this 2 times" in emit_vllm(ten)
    assert server(replicas=1).data_parallel == 1
    assert (server("llama-3.1-70b", replicas=3).data_parallel, server("llama-3.1-70b", replicas=5).servers) == (3, 2)
    experts = server("qwen3-30b-a3b", replicas=4)
    assert (experts.data_parallel, experts.servers) == (1, 4)


def test_stages_on_several_machines_are_joined_by_ray() -> None:
    text = emit_vllm(server("llama-3.1-405b", replicas=1))
    assert text.startswith("# First join 2 machines in a Ray cluster")
    words = commands(text)[0]
    at = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--")}
    assert (at["--tensor-parallel-size"], at["--pipeline-parallel-size"]) == ("8", "2")
    assert at["--distributed-executor-backend"] == "ray"


def test_two_pools_move_caches_with_a_real_connector() -> None:
    words = commands(emit_vllm(server(split=SPLIT)))[1]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] in FLAGS_PAGE.split("Connectors registered:")[1]
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    assert "--data-parallel-size" not in words
    assert "2 servers that read prompts and 1 that decode" in emit_vllm(server(split=SPLIT))
    assert "kv-transfer" not in emit_vllm(server(split=Split(2, 1, 0.9, 0.5, 3)))


def served(text: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a program does with Ray: run with a stand-in that has the names of its API and nothing else."""
    seen = SimpleNamespace(app=None, blocking=None)
    llm = ModuleType("ray.serve.llm")
    fields = {"model_loading_config", "accelerator_type", "deployment_config", "engine_kwargs"}

    def config(**given: Any) -> SimpleNamespace:
        assert set(given) <= fields
        return SimpleNamespace(**given)

    def run(app: object, blocking: bool) -> None:
        seen.app, seen.blocking = app, blocking

    for name, value in (("LLMConfig", config), ("build_openai_app", dict), ("build_pd_openai_app", dict)):
        setattr(llm, name, value)
    serve, ray = ModuleType("ray.serve"), ModuleType("ray")
    serve.run, serve.llm, ray.serve = run, llm, serve  # type: ignore[attr-defined]
    for name, module in (("ray", ray), ("ray.serve", serve), ("ray.serve.llm", llm)):
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(ast.parse(text), "emitted", "exec"), {})
    assert seen.blocking
    return seen


@each_server
def test_a_ray_application_runs_and_has_the_same_settings(each: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    app = served(emit_ray(each), monkeypatch).app
    if each.split:
        assert set(app) == {"prefill_config", "decode_config"}
        copies = [app[side].deployment_config["autoscaling_config"]["min_replicas"] for side in app]
        assert copies == [2, 1]
        assert app["decode_config"].engine_kwargs["kv_transfer_config"]["kv_connector"] == "NixlConnector"
        return
    (config,) = app["llm_configs"]
    kwargs = {flag.name[2:].replace("-", "_"): flag.value for flag in each.engine_flags}
    kwargs.pop("distributed_executor_backend", None)
    assert {name: str(value) for name, value in config.engine_kwargs.items()} == kwargs
    assert isinstance(config.engine_kwargs["max_model_len"], int)
    assert config.model_loading_config["model_source"] == each.model_id
    scaling = config.deployment_config["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["target_ongoing_requests"]) == (each.replicas, 13)


def test_cards_have_the_names_of_ray() -> None:
    assert "accelerator_type='H100'" in emit_ray(server())
    assert "accelerator_type" not in emit_ray(server("qwen2.5-0.5b", "rtx-4090"))


def pod_of(each: Server) -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, _ = yaml.safe_load_all(emit_k8s(each))
    pod = deployment["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_a_manifest_is_a_deployment_and_its_service() -> None:
    deployment, service = yaml.safe_load_all(emit_k8s(server(replicas=4)))
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    assert (deployment["apiVersion"], service["apiVersion"]) == ("apps/v1", "v1")
    assert deployment["spec"]["replicas"] == 4
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", deployment["metadata"]["name"])
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in pod_of(server())[1]["ports"]}


def test_a_pod_has_the_cards_the_flags_and_a_start_that_may_take_long() -> None:
    """A card of Llama-3.1-70B in four: 141 GB from a network disk take 12 minutes, and nobody kills it meanwhile."""
    each = server("llama-3.1-70b", gpus_per_node=4)
    pod, container = pod_of(each)
    assert container["image"] == "vllm/vllm-openai:v0.32.0"
    assert container["command"] == ["vllm", "serve", "meta-llama/Llama-3.1-70B"]
    assert container["args"] == [f"{flag.name}={flag.value}" for flag in each.engine_flags]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": each.replica.cards}
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert container["volumeMounts"][0] == {"name": pod["volumes"][0]["name"], "mountPath": "/dev/shm"}
    probe = container["startupProbe"]
    assert 900 < probe["periodSeconds"] * probe["failureThreshold"] < 1200
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": 8000}
    small_pod, small = pod_of(server())
    assert "volumes" not in small_pod
    assert small["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_what_kubernetes_cannot_start_so_is_refused() -> None:
    with pytest.raises(ConfigError, match="a replica of 16 cards is more than one pod on one machine of 8"):
        emit_k8s(server("llama-3.1-405b"))
    with pytest.raises(ConfigError, match="the manifest is for NVIDIA cards, and this is AMD MI300X"):
        emit_k8s(server(card="mi300x"))


def test_forms_and_cards_without_a_server_are_refused() -> None:
    laptop = Deployment(model="qwen2.5-0.5b", hardware="m4-pro")
    assert not serves(laptop.card)
    plan = CapacityPlan(
        deployment=laptop, goal=GOAL, replica=instance(laptop, 1, 1), load=Trial(1, 1.0, 1.0, {"running_mean": 1.0})
    )
    with pytest.raises(ConfigError, match="vllm serve has no build for Apple M4 Pro"):
        plan.emit("vllm")
    with pytest.raises(ConfigError, match="no form is called 'helm'; choose vllm, ray, k8s"):
        plan.emit("helm")
