"""The engine process as the worker's I/O process starts it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PARENT = """
import asyncio, time
from headrace_worker.engine_link import EngineLink
async def main():
    link = await EngineLink.start("slow_engine")
    print(link.pid, flush=True)
    time.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_an_engine_that_is_still_importing_dies_with_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "slow_engine.py").write_text("import time\ntime.sleep(30)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    with parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 10
        while "slow_engine" not in engine.cmdline() or "tether" in " ".join(engine.cmdline()):
            assert time.monotonic() < deadline, "the engine was not started"
            time.sleep(0.02)
        parent.kill()
    _, alive = psutil.wait_procs([engine], timeout=5)
    assert not alive
