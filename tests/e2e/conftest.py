"""Running systems for the tests that leave them as they found them."""

from collections.abc import Iterator

import pytest

from tests.e2e.launcher import Launched, launched

ADAPTERS = "adapters"
"""Below a system's data folder."""


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two routers, two schedulers and two workers with the real model, context 1024, and a folder for adapters."""
    folder = tmp_path_factory.mktemp("system")
    (folder / ADAPTERS).mkdir()
    environment = {"HEADRACE_CONTEXT": "1024", "HEADRACE_NUM_BLOCKS": "1024", "HEADRACE_NUM_THREADS": "1"}
    environment |= {"HEADRACE_LORA_DIR": str(folder / ADAPTERS)}
    scale = ("--routers", "2", "--schedulers", "2", "--workers", "2")
    with launched(folder, *scale, environment=environment) as launched_system:
        yield launched_system


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two routers, a scheduler and a worker whose engine answers as its prompts say (`tests.scripted_text`), context
    4096, 256 blocks of 16. The routers listen for other machines too."""
    environment = {"HEADRACE_ENGINE_MODULE": "tests.scripted_text", "SCRIPTED_STEP_S": "0.002"}
    environment |= {"HEADRACE_NUM_BLOCKS": "256", "HEADRACE_STALL_TIMEOUT_S": "10", "HEADRACE_LOG_LEVEL": "debug"}
    arguments = ["--routers", "2", "--model", "smollm2-135m", "--no-autoscaler", "--host", "0.0.0.0", "--open-to-all"]
    with launched(tmp_path_factory.mktemp("scripted"), *arguments, environment=environment) as launched_system:
        yield launched_system
