"""The `llm` command with an OpenAI-compatible model, as its users configure it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

SAID = "Grüße, 世界 🦉"


@pytest.fixture
def folder(scripted: Launched, tmp_path: Path) -> Path:
    entries = ""
    for name, options in (("local", "supports_schema: true\n  supports_tools: true"), ("text", "completion: true")):
        entries += f"- model_id: {name}\n  model_name: {MODEL}\n  api_base: {scripted.url}/v1\n  {options}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entries)
    return tmp_path


def llm(folder: Path, *arguments: str) -> str:
    # Without plugins: that of the built-in model's package wants an inference library.
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": "", "PYTHONWARNINGS": ""}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prompts_conversations_and_schemas(folder: Path) -> None:
    assert llm(folder, "-m", "local", json.dumps({"text": SAID})).strip() == SAID
    assert llm(folder, "-c", json.dumps({"text": "two"})).strip() == "two"
    script = json.dumps({"text": '{"name": "Ada", "age": 36}'})
    told = llm(folder, "-m", "local", "--schema", "name, age int", script, "--no-stream")
    assert json.loads(told) == {"name": "Ada", "age": 36}
    logged = json.loads(llm(folder, "logs", "--json"))
    assert [entry["response"] for entry in logged] == [SAID, "two", told.strip()]
    assert [entry["output_tokens"] for entry in logged[:2]] == [len(SAID.encode()) + 1, 4]


def test_the_text_endpoint(folder: Path) -> None:
    asked = ("-m", "text", json.dumps({"text": SAID}), "-o", "max_tokens", "100")
    assert llm(folder, *asked).strip() == SAID
