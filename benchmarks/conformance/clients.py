"""Compliance tests and command-line clients."""

import json
from pathlib import Path

from benchmarks.conformance.target import Finding, Target, ToolFailed, binary, run, version_of

FORMATS = {"chat": "openai-chat", "responses": "open-responses", "messages": "anthropic"}
NOT_OURS = ("image-input",)
"""Tests of what no text model can do."""


def llm_comply(target: Target, way: str) -> Finding:
    """https://github.com/Oaklight/llm-comply: answers against the published schemas."""
    venv = target.tools / "llm-comply"
    command: list[str | Path] = [binary(venv, "llm-comply"), "--format", FORMATS[way]]
    command += ["--base-url", f"{target.url}/v1"]
    command += ["--api-key", "none", "--model", target.model, "--json", "--timeout", "120"]
    if way == "messages":
        command += ["--auth-header", "x-api-key", "--no-bearer", "--header", "anthropic-version:2023-06-01"]
    written = run(command, accepts=(0, 1))
    told = json.loads(written[written.index("{") :])
    failed = [each for each in told["results"] if each["status"] == "failed"]
    ours = [each for each in failed if not each["id"].endswith(NOT_OURS)]
    warned = [each["id"] for each in told["results"] if each.get("warnings")]
    skipped = [each["id"] for each in told["results"] if each["status"] == "skipped"]
    notes = [f"{each['id']}: {'; '.join(each['errors'])[:300]}" for each in ours]
    notes += [f"not for a text model: {each['id']}" for each in failed if each not in ours]
    notes += [f"warned: {', '.join(warned)}"] if warned else []
    notes += [f"skipped: {', '.join(skipped)}"] if skipped else []
    version = version_of(venv, "llm-comply")
    return Finding("llm-comply", way, version, told["summary"]["passed"], len(ours), note=" | ".join(notes))


def openai_command(target: Target, way: str) -> Finding:
    """https://github.com/openai/openai-python, the last series with a command."""
    venv = target.tools / "openai-1"
    environment = {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": "none"}
    command = binary(venv, "openai")
    asked = ["-m", target.model, "-t", "0"]
    if way == "chat":
        asked = ["chat.completions.create", *asked, "-g", "user", "What is the capital of France?"]
    else:
        asked = ["completions.create", *asked, "-p", "The capital of France is"]
    listed = run([command, "api", "models.list"], environment)
    whole, streamed = (run([command, "api", *asked, *stream], environment) for stream in ([], ["--stream"]))
    if target.model not in listed or "Paris" not in whole or "Paris" not in streamed:
        raise ToolFailed(f"{listed}\n{whole}\n{streamed}")
    return Finding("openai command", way, version_of(venv, "openai"), 3, 0)
