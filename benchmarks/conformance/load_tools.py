"""Load tools, with the options that their manuals show, and what their reports say.

Every one of them asks for 64 tokens in and 16 out, with more requests at a time than the worker takes, so that most of
them wait in the queue for a while, and measures the time to the first token from the events of the stream.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conformance.target import Finding, Target, ToolFailed, binary, run, version_of

NUM_REQUESTS = 20
NUM_AT_ONCE = 5
NUM_PLACES = 2
NUM_PROMPT = 64
NUM_NEW = 16

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


def guidellm(target: Target, way: str) -> Finding:
    """https://github.com/vllm-project/guidellm"""
    venv = target.tools / "guidellm"
    report = target.folder / "benchmarks.json"
    run(
        [
            binary(venv, "guidellm"),
            *("run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={target.url},request_format={PATHS[way]}"),
            *("--profile", f"kind=concurrent,streams={NUM_AT_ONCE}"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_NEW}"),
            *("--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"),
            *("--output", f"kind=json,path={report}"),
        ],
        folder=target.folder,
    )
    [benchmark] = _read(report)["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    num_new = metrics["output_token_count"]["successful"]["mean"]
    return Finding(
        "guidellm",
        way,
        version_of(venv, "guidellm"),
        totals["successful"],
        totals["errored"] + (0 if round(num_new) == NUM_NEW else 1),
        metrics["time_to_first_token_ms"]["successful"]["mean"],
        f"{num_new:.1f} tokens each",
    )


def aiperf(target: Target, way: str) -> Finding:
    """https://github.com/ai-dynamo/aiperf"""
    venv = target.tools / "aiperf"
    run(
        [
            binary(venv, "aiperf"),
            *("profile", "--model", target.model, "--url", target.url, "--tokenizer", target.tokenizer),
            *("--endpoint-type", {"chat": "chat", "text": "completions"}[way], "--streaming"),
            *("--concurrency", str(NUM_AT_ONCE), "--request-count", str(NUM_REQUESTS)),
            *("--synthetic-input-tokens-mean", str(NUM_PROMPT), "--output-tokens-mean", str(NUM_NEW)),
            *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
            *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", target.folder),
        ],
        # Told to be offline, it looks for a tokenizer in the hub's cache only; of a folder it asks no hub.
        {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""},
        folder=target.folder,
    )
    report = _read(_only(target.folder, "profile_export_aiperf.json"))
    num_new = report["output_sequence_length"]["avg"]
    errors = (report.get("error_request_count") or {}).get("avg", 0) + len(report.get("error_summary") or [])
    return Finding(
        "aiperf",
        way,
        version_of(venv, "aiperf"),
        int(report["request_count"]["avg"]),
        int(errors) + (0 if round(num_new) == NUM_NEW else 1),
        report["time_to_first_token"]["avg"],
        f"{num_new:.1f} tokens each",
    )


def inference_perf(target: Target, way: str) -> Finding:
    """https://github.com/kubernetes-sigs/inference-perf"""
    venv = target.tools / "inference-perf"
    lengths = {"std_dev": 0, "total_count": NUM_REQUESTS}
    data: dict[str, Any] = {"type": "random"}
    data["input_distribution"] = {"min": NUM_PROMPT, "max": NUM_PROMPT, "mean": NUM_PROMPT, **lengths}
    data["output_distribution"] = {"min": NUM_NEW, "max": NUM_NEW, "mean": NUM_NEW, **lengths}
    if way == "chat":
        groups = {"num_groups": NUM_AT_ONCE, "num_prompts_per_group": NUM_REQUESTS // NUM_AT_ONCE, "seed": 1}
        half = NUM_PROMPT // 2
        shared = {**groups, "system_prompt_len": half, "question_len": half, "output_len": NUM_NEW}
        data = {"type": "shared_prefix", "shared_prefix": shared}
    config = {
        "api": {"type": {"chat": "chat", "text": "completion"}[way], "streaming": True},
        "data": data,
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "base_seed": 1,
            "stages": [{"num_requests": NUM_REQUESTS, "concurrency_level": NUM_AT_ONCE}],
        },
        "server": {"type": "vllm", "model_name": target.model, "base_url": target.url},
        "tokenizer": {"pretrained_model_name_or_path": str(target.tokenizer)},
        "storage": {"local_storage": {"path": str(target.folder / "reports")}},
    }
    path = target.folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    run([binary(venv, "inference-perf"), "--config_file", path], folder=target.folder)
    report = _read(_only(target.folder, "summary_lifecycle_metrics.json"))
    latency = report["successes"]["latency"]
    return Finding(
        "inference-perf",
        way,
        version_of(venv, "inference-perf"),
        report["successes"]["count"],
        report["failures"]["count"],
        1000 * latency["time_to_first_token"]["mean"],
        f"{report['successes']['output_len']['mean']:.1f} tokens each",
    )


def vllm_bench(target: Target, way: str) -> Finding:
    """https://docs.vllm.ai/en/latest/cli/bench/serve.html"""
    venv = target.peers / "vllm"
    report = target.folder / "result.json"
    run(
        [
            binary(venv, "vllm"),
            *("bench", "serve", "--backend", {"chat": "openai-chat", "text": "openai"}[way]),
            *("--base-url", target.url, "--endpoint", PATHS[way], "--model", target.model),
            *("--tokenizer", target.tokenizer, "--dataset-name", "random", "--ignore-eos"),
            *("--random-input-len", str(NUM_PROMPT), "--random-output-len", str(NUM_NEW)),
            *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(NUM_AT_ONCE)),
            *("--save-result", "--result-filename", report),
        ],
        {"VLLM_NO_USAGE_STATS": "1"},
        folder=target.folder,
    )
    told = _read(report)
    expected = NUM_REQUESTS * NUM_NEW
    return Finding(
        "vllm bench serve",
        way,
        version_of(venv, "vllm"),
        told["completed"],
        NUM_REQUESTS - told["completed"] + (0 if told["total_output_tokens"] == expected else 1),
        told["mean_ttft_ms"],
        f"{told['total_output_tokens'] / NUM_REQUESTS:.1f} tokens each",
    )


LOAD_TOOLS: dict[str, Callable[[Target, str], Finding]] = {
    "guidellm": guidellm,
    "aiperf": aiperf,
    "inference-perf": inference_perf,
    "vllm-bench": vllm_bench,
}


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def _only(folder: Path, name: str) -> Path:
    found = sorted(folder.rglob(name))
    if len(found) != 1:
        raise ToolFailed(f"{len(found)} files called {name}")
    return found[0]
