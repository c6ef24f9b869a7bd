"""Makes all streams and buckets there are, for those who may."""

import asyncio

from headrace_shared.bus import Bus
from headrace_shared.errors import BusRefused
from headrace_shared.subjects import BUCKETS, FLIGHT, REQUESTS, STREAMS, StreamSpec, bucket_stream


async def provision(bus: Bus, queue: StreamSpec) -> None:
    """The others wait for them. Not the flight recording's, which a scheduler may be told to do without. May be
    repeated: a broker that was restarted has lost what was in its memory. Raises BusError."""
    making = [bus.ensure_stream(stream) for stream in (queue, *STREAMS) if stream is not FLIGHT]
    making += [bus.ensure_bucket(bucket) for bucket in BUCKETS]
    results = await asyncio.gather(*making, return_exceptions=True)
    problem = next((result for result in results if result is not None), None)
    if problem is not None:
        raise problem


async def missing(bus: Bus) -> list[str]:
    """Those of them that are not there. Raises BusError."""
    names = [REQUESTS, *(stream.name for stream in STREAMS if stream is not FLIGHT)]
    names += [bucket_stream(bucket.name) for bucket in BUCKETS]
    results = await asyncio.gather(*map(bus.made_at, names), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, BusRefused):
            raise result
    return [name for name, result in zip(names, results, strict=True) if isinstance(result, BusRefused)]
