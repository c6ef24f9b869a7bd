"""The engine process as the worker's I/O process starts it."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace_worker.engine_link import EngineDied, EngineLink

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


async def test_how_an_engine_ended_is_known_also_if_something_was_sent_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mortal_engine.py").write_text(
        "import os, sys, time\nos.close(int(sys.argv[1]))\ntime.sleep(0.5)\nos._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    link = await EngineLink.start("mortal_engine")
    reading = asyncio.create_task(link.read())
    while not reading.done():
        link.send_bytes(b"x")
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDied, match="exit code 7"):
        await reading
    await link.close()
