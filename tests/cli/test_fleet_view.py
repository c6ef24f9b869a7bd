"""What services say about themselves, and what is known better."""

from headrace_cli.fleet_view import SILENT_S, FleetView
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.subjects import telemetry_subject
from tests.shared.bus_helpers import until


async def test_who_has_done_its_work_is_ready_until_it_says_otherwise() -> None:
    bus, view = MemoryBus(), FleetView()
    await view.start(bus)

    async def hear(state: str) -> None:
        figures = Telemetry(service="router", id="router-1", state=state, gauges={"health_port": 8000.0})
        bus.publish(telemetry_subject("router", "router-1"), encode(figures))
        await until(lambda: view.of("router-1").state == state)

    await hear("no worker is ready")
    view.found_ready("router-1")
    assert view.of("router-1").state == "ready" and view.of("router-1").gauges["health_port"] == 8000.0
    await hear("the queue does not answer")
    await view.close()


async def test_who_was_ready_was_so_though_it_says_that_it_leaves() -> None:
    """As workers do whose engine failed."""
    bus, view = MemoryBus(), FleetView()
    await view.start(bus)
    for state, expected in (("loading", False), ("ready", True), ("leaving", True)):
        figures = Telemetry(service="worker", id="worker-1", state=state, gauges={})
        bus.publish(telemetry_subject("worker", "worker-1"), encode(figures))
        await until(lambda state=state: view.of("worker-1").state == state)  # type: ignore[misc]
        assert view.of("worker-1").was_ready is expected
    assert not view.of("worker-2").was_ready
    await view.close()


async def test_who_is_not_heard_of_any_more_is_not_shown_as_it_was() -> None:
    """As a process that is frozen: `headrace ps` called it ready."""
    now = 100.0
    bus, view = MemoryBus(), FleetView(lambda: now)
    await view.start(bus)
    assert view.shown_state("router-1") == ""
    figures = Telemetry(service="router", id="router-1", state="ready", gauges={})
    bus.publish(telemetry_subject("router", "router-1"), encode(figures))
    await until(lambda: view.shown_state("router-1") == "ready")
    now += SILENT_S + 1.0
    assert view.shown_state("router-1") == "silent"
    bus.publish(telemetry_subject("router", "router-1"), encode(figures))
    await until(lambda: view.shown_state("router-1") == "ready")
    await view.close()
