"""The router's settings."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace_shared.common_settings import QueueSettings


class RouterSettings(QueueSettings, frozen=True, kw_only=True):
    """Settings of the router; those of every service come first."""

    host: str = "127.0.0.1"
    """Address that clients connect to."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port that clients connect to; 0: a free one."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=256 * 1024 * 1024)] = 16 * 1024 * 1024
    """Largest request body."""
    body_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """Longest time for a client to send its request body."""
    request_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Longest time from arrival to the last token. Clients may ask for less (`Headrace-Timeout`)."""
    reattach_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 8.0
    """A resumable call whose client is gone is cancelled after this time, unless the client comes back."""
    stall_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """After so long without a token, once the first one has come, the queue is asked whether it still holds the
    request. What is held is waited for, until its time is up; what is not is lost, and the call fails."""
    publish_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 15.0
    """Longest time to get a request into the queue while the broker is away. A cluster may elect for 9 s."""
    ping_interval_s: Annotated[float, Meta(gt=0, le=15)] = 10.0
    """Time between comments in a stream that has nothing to tell."""
    send_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """A client that reads nothing for so long is cut off."""
    drain_delay_s: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """Time between turning unready and closing the port, for load balancers to notice."""
    max_inflight: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Most requests whose clients are waiting at once."""
    max_queued_requests: Annotated[int, Meta(ge=1)] = 10_000
    """Most requests of a model that wait for their first token, over all routers. A fifth is kept for clients that were
    refused and come back when they were told to; so is a fifth of the next two."""
    max_queued_tokens: Annotated[int, Meta(ge=1)] = 20_000_000
    """Most tokens of those: prompts and expected answers."""
    max_wait_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0
    """Longest expected time to the first token; calls that would wait longer are refused."""
    queue_full_status: Literal[429, 503, 529] = 429
    """HTTP status of a call that is refused because too much waits."""
    overloaded_status: Literal[429, 503, 529] = 503
    """HTTP status of a call that is refused because it would wait too long, or beyond its deadline."""
    no_worker_patience_s: Annotated[float, Meta(ge=0, le=86400)] = 120.0
    """Calls to a model without workers, and without an autoscaler that could start one, are queued for so long; later
    ones are refused."""
    queue_report_interval_s: Annotated[float, Meta(ge=0.1, le=15)] = 1.0
    """Time between two reports of position and expected wait to a stream that waits."""
    overflow: tuple[str, ...] = ()
    """Which smaller model may answer for which, as MODEL=SMALLER, for calls that allow it."""
    overflow_above_s: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    """Overflowing begins when the first token is expected later than this."""
    overflow_below_s: Annotated[float, Meta(ge=0, le=86400)] = 3.0
    """It ends when the first token is expected before this."""
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 20_000
    """Most open client connections."""
    max_connections_per_address: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Most open connections from one address (IPv6: from its /64). Lower it where clients connect directly, and not
    through a proxy."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients reach this router, besides addresses, localhost and names that public DNS cannot hold;
    *.example.com: all below it; *: any. Unless set: any, where keys are required and host is no loopback address."""
    cors_origins: tuple[str, ...] = ()
    """Origins (https://app.example.com) whose web pages may call this router from a browser; *: any."""
    stream_buffer: Annotated[int, Meta(ge=16, le=1_000_000)] = 4096
    """Most events kept for a client that reads slowly."""
    require_keys: bool = False
    """Answer only callers with an API key (`headrace keys create`), except for /health and /live."""
    open_metrics: bool = False
    """With require-keys: /metrics needs no key either."""
    cache_sharing: Literal["tenant", "all"] = "tenant"
    """Who shares cached prompts: callers of one tenant, or all. Shared ones answer faster, and by that tell who has
    asked the same before."""
    max_file_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 100 * 1024 * 1024
    """Largest file that a client may store (/v1/files). All files together have 2 GiB in the broker."""
    file_quota_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 512 * 1024 * 1024
    """Most bytes of one tenant's files."""
    file_quota_count: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    """Most files of one tenant."""
    upload_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Longest time for a client to send a file."""
    max_batch_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    """Most requests in a batch (/v1/batches)."""
    batch_concurrency: Annotated[int, Meta(ge=1, le=1000)] = 16
    """Most requests of a batch at once. An API key's limit of concurrent requests lowers it to half of that."""
    max_active_batches: Annotated[int, Meta(ge=1, le=1000)] = 16
    """Most batches that are worked on at once, over all routers; the others wait."""
    max_active_batches_per_tenant: Annotated[int, Meta(ge=1, le=1000)] = 4
    """Most of those of one tenant."""
    max_unfinished_batches: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Most unfinished batches of one tenant."""
    batch_window_s: Annotated[float, Meta(gt=0, le=86400)] = 86_400.0
    """Time that a batch has; what is not done then has expired."""
    dashboard: bool = True
    """Serve the live page at /dashboard."""
    trace_content: bool = False
    """Put prompts and answers into traces too, where there are any. Whoever sees the traces reads them."""
    tokenizer_threads: Annotated[int, Meta(ge=1, le=256)] = 4
    """Threads that render templates and tokenize."""
    max_waiting_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """Most prompts that wait for such a thread."""
