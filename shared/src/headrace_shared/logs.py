"""Logs: one line an event on stderr, with `service`, `id` and, where bound, `request_id` and `trace_id`.

Prompt and answer text is never logged.
"""

import logging
import sys
from collections.abc import Callable
from typing import IO, Any

import structlog


def configure_logging(
    service: str,
    service_id: str,
    level: str,
    log_format: str,
    stream: IO[str] | None = None,
    find_trace_id: Callable[[str], str | None] = lambda _: None,
) -> None:
    """Sets up structlog, and the standard library's logging (of uvicorn, say) in the same form. Once a process.
    `stream` is stderr if not given. `find_trace_id`: of a request, for lines that name one and no trace."""
    stream = stream or sys.stderr
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())

    def identify(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if "request_id" in event and "trace_id" not in event and (trace_id := find_trace_id(event["request_id"])):
            event["trace_id"] = trace_id
        return {"service": service, "id": service_id, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        identify,
    ]
    # Local variables may hold prompts and passwords.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    last: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    # A disk that is full ends no service and fills no terminal with a traceback for each line that cannot be written.
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
