"""lm-eval over the API against lm-eval with transformers in process: same scores, sums of log-probabilities and texts.

Both compute the same checkpoint in float32. Tasks: choices by log-likelihood, greedy answers, and the log-likelihood of
whole texts, all of them on the questions beside this file.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conformance.target import Finding, Target, ToolFailed, binary, run, version_of

QUESTIONS = Path(__file__).with_name("questions.jsonl")
TASKS = ("tiny_choice", "tiny_answer", "tiny_text")
TOLERANCE = 0.02
"""Between two sums of log-probabilities: float32 on both sides, in another order."""


def lm_eval(target: Target, way: str) -> Finding:
    """https://github.com/EleutherAI/lm-evaluation-harness"""
    venv = target.tools / "lm-eval"
    tasks = target.folder / "tasks"
    tasks.mkdir()
    for name, task in _tasks().items():
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))
    over_api = f"model={target.model},base_url={target.url}/v1/completions,tokenizer={target.tokenizer}"
    over_api += ",tokenizer_backend=huggingface,num_concurrent=4,max_retries=1"
    models = {
        "api": ["--model", "local-completions", "--model_args", over_api, "--batch_size", "4"],
        "transformers": ["--model", "hf", "--model_args", f"pretrained={target.tokenizer},dtype=float32"],
    }
    models["transformers"] += ["--device", "cpu", "--batch_size", "1"]
    told = {}
    for name, arguments in models.items():
        command: list[str | Path] = [binary(venv, "lm_eval"), "--tasks", ",".join(TASKS), *arguments]
        command += ["--include_path", tasks]
        run([*command, "--output_path", target.folder / name, "--log_samples"], folder=target.folder)
        told[name] = _told(target.folder / name)
    scores, samples = zip(*(told[name] for name in models), strict=True)
    differences = _differences(*samples)
    differences += [f"scores {scores}"] if scores[0] != scores[1] else []
    if not samples[0]:
        raise ToolFailed("no samples")
    note = ", ".join(f"{name} {value:.4g}" for name, value in scores[0].items())
    note = " | ".join([note, *differences[:5]])
    return Finding("lm-eval", way, version_of(venv, "lm-eval"), len(samples[0]), len(differences), note=note)


def _tasks() -> dict[str, dict[str, Any]]:
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(QUESTIONS)}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "metadata": {"version": 1},
    }
    choice: dict[str, Any] = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
    }
    choice |= {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    answer: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    answer["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    answer["metric_list"] = [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}]
    text: dict[str, Any] = {"output_type": "loglikelihood_rolling", "doc_to_text": ""}
    text |= {"doc_to_target": "{{question}} {{choices | join(', ')}}", "metric_list": [{"metric": "word_perplexity"}]}
    return {name: {"task": name, **common, **own} for name, own in zip(TASKS, (choice, answer, text), strict=True)}


def _told(folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores by task and metric, to four digits; and what was answered, by task, question and request."""
    results = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
    scores = {
        f"{task} {metric.partition(',')[0]}": float(f"{value:.4g}")
        for task, told in sorted(results.items())
        for metric, value in told.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    answers = {}
    for path in folder.rglob("samples_*.jsonl"):
        task = next(name for name in TASKS if name in path.name)
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            for number, response in enumerate(sample["resps"]):
                answers[f"{task} {sample['doc_id']}.{number}"] = response[0]
    return scores, answers


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    found = [f"{name}: only one side" for name in ours.keys() ^ theirs.keys()]
    for name in sorted(ours.keys() & theirs.keys()):
        pair = _number(ours[name]), _number(theirs[name])
        if isinstance(pair[0], float) and isinstance(pair[1], float):
            if abs(pair[0] - pair[1]) > TOLERANCE:
                found.append(f"{name}: {pair[0]:.4f} and {pair[1]:.4f}")
        elif pair[0] != pair[1]:
            found.append(f"{name}: {pair[0]!r} and {pair[1]!r}")
    return found


def _number(response: Any) -> float | str:
    """A sum of log-probabilities, with or without whether it is the greedy one, or a text."""
    first = response[0] if isinstance(response, list) else response
    try:
        return float(first)
    except ValueError:
        return str(first)
