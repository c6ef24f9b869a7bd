"""What services do not need until somebody asks for it, their starts do not pay for."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc, importlib, sys
importlib.import_module(sys.argv[1])
assert not gc.isenabled()
loaded = {name for name in ("rich", "yaml", "docker", "numpy", "torch", "opentelemetry.sdk") if sys.modules.get(name)}
print(*sorted(loaded))
"""


@pytest.mark.parametrize("service", ["router", "scheduler", "worker", "autoscaler"])
def test_a_service_imports_little(service: str) -> None:
    command = [sys.executable, "-c", SCRIPT, f"headrace_{service}.__main__"]
    done = subprocess.run(command, check=True, timeout=200, stdout=subprocess.PIPE)
    assert done.stdout.decode().split() == []
