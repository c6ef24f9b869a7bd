"""Names of what the router counts, beyond those that it shares with other services.

The `vllm:` names are those of vLLM's server, so that dashboards and load tools made for it work. Buckets of lengths
and of token latencies are vLLM's too.
"""

from headrace_shared.telemetry import Instrument

_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)

HTTP_DURATION = Instrument(
    "histogram",
    "http_server_request_duration_seconds",
    "HTTP requests, streams to their end.",
    ("http_request_method", "http_route", "http_response_status_code"),
    _HTTP,
)
CALLS = Instrument(
    "counter",
    "headrace_calls_total",
    "Calls by how they ended, each once: stop, length, cancelled, timeout, error, rejected, or cut to go on elsewhere.",
    ("model", "outcome"),
)
BATCHES_RUNNING = Instrument("gauge", "headrace_batches_running", "Batches that this router works on.")
BATCH_LINES = Instrument(
    "counter", "headrace_batch_lines_total", "Requests of batches that are done: completed or failed.", ("outcome",)
)
CLIENT_RETRIES = Instrument(
    "counter", "headrace_client_retries_total", "HTTP requests that OpenAI's clients say are another try.", ()
)
TOKEN_GAP = Instrument(
    "histogram",
    "vllm:inter_token_latency_seconds",
    "Time between tokens that are sent, of calls with one choice.",
    ("model_name", "engine"),
    _TOKEN_GAPS,
)
REQUEST_SUCCESS = Instrument(
    "counter", "vllm:request_success_total", "Calls by why they ended.", ("model_name", "engine", "finished_reason")
)
PROMPT_LENGTH = Instrument(
    "histogram", "vllm:request_prompt_tokens", "Prompt tokens of a call.", ("model_name", "engine"), _LENGTHS
)
OUTPUT_LENGTH = Instrument(
    "histogram", "vllm:request_generation_tokens", "Generated tokens of a call.", ("model_name", "engine"), _LENGTHS
)
PARAMS_N = Instrument(
    "histogram", "vllm:request_params_n", "Choices asked for.", ("model_name", "engine"), (1.0, 2.0, 5.0, 10.0, 20.0)
)
PARAMS_MAX_TOKENS = Instrument(
    "histogram", "vllm:request_params_max_tokens", "Most tokens of a choice.", ("model_name", "engine"), _LENGTHS
)
