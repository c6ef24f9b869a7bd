import contextlib
import io
import os
import pty

from headrace_cli.display import LiveDisplay, PlainDisplay, Row, make_display


def test_plain_lines_say_each_state_once() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for done in (0.0, 1.0, 2.0):
        display.show([Row("worker-1", "loading", (done, 4.0)), Row("router-1", "no worker is ready")])
    display.show([Row("worker-1", "ready"), Row("router-1", "ready")])
    display.show([Row("worker-1", "ready"), Row("router-1", "ready")])
    display.close()
    display.say("done")
    assert stream.getvalue().splitlines() == [
        "worker-1: loading 0 %",
        "router-1: no worker is ready",
        "worker-1: ready",
        "router-1: ready",
        "done",
    ]


def test_a_gone_reader_is_ignored() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w", buffering=1)
    PlainDisplay(stream).say("nobody hears this")
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_the_live_table_needs_a_terminal_and_no_objection() -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        assert isinstance(make_display({"TERM": "xterm"}, stream), LiveDisplay)
        for name in ("CI", "NO_COLOR"):
            assert isinstance(make_display({"TERM": "xterm", name: "1"}, stream), PlainDisplay)
        assert isinstance(make_display({"TERM": "dumb"}, stream), PlainDisplay)
    os.close(main)
    assert isinstance(make_display({}, io.StringIO()), PlainDisplay)


def read_all(main: int) -> str:
    """What came through a pseudo-terminal whose other end is closed; the kernel reports that end as an OSError."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(main, 65536):
            parts.append(part)
    os.close(main)
    return b"".join(parts).decode()


def test_the_live_table_shows_states_and_progress() -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        display = make_display({"TERM": "xterm"}, stream)
        display.show([Row("worker-1", "loading", (25.0, 100.0)), Row("router-1", "ready")])
        display.say("[bold] is no markup here")
        display.close()
        display.close()
        display.say("Application startup complete.")
    shown = read_all(main)
    assert "worker-1" in shown and "25 %" in shown and "router-1" in shown
    assert "[bold] is no markup here" in shown and "Application startup complete." in shown


def test_a_terminal_that_is_closed_is_ignored() -> None:
    """As where `headrace up` was told to outlive it."""
    main, terminal = pty.openpty()
    stream = os.fdopen(terminal, "w")
    display = make_display({"TERM": "xterm"}, stream)
    os.close(main)
    display.show([Row("router-1", "starting")])
    display.say("nobody sees this")
    display.show([Row("router-1", "ready")])
    display.close()
    with contextlib.suppress(OSError):
        stream.close()
