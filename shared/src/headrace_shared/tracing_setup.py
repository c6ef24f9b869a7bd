"""Whether this process traces, by OpenTelemetry's standard variables. Without a collector it costs nothing."""

from collections.abc import Mapping
from importlib import import_module

import structlog

from headrace_shared.telemetry import Metrics
from headrace_shared.tracing import Tracing

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

log = structlog.get_logger(__name__)


def wants_tracing(environ: Mapping[str, str]) -> bool:
    """A collector is named, and nothing forbids to use it."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none"
    return not is_off and (exporter == "otlp" or any(environ.get(name) for name in ENDPOINTS))


def set_up_tracing(service: str, service_id: str, metrics: Metrics, environ: Mapping[str, str]) -> Tracing | None:
    """None: this process makes no spans. What cannot be used is said once, and is no reason not to serve."""
    if not wants_tracing(environ):
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning("no traces: only http/protobuf is supported", protocol=protocol[:32])
        return None
    try:
        module = import_module("headrace_shared.otel")
        tracing: Tracing = module.OtelTracing(service, service_id, metrics)
    except (ImportError, ValueError) as error:
        log.warning("no traces: OpenTelemetry cannot be set up", error=type(error).__name__)
        return None
    return tracing
