from msgspec.structs import replace

from headrace_scheduler.trace_ids import MAX_KNOWN, TraceIds
from headrace_shared.messages import RequestId
from headrace_shared.trace_context import new_trace
from tests.shared.samples import REQUEST


def test_the_latest_requests_are_known() -> None:
    ids, trace = TraceIds(), new_trace()
    ids.note(replace(REQUEST, trace=trace.to_headers()))
    assert ids.find(REQUEST.request_id) == trace.trace_id
    ids.note(replace(REQUEST, request_id=RequestId("f" * 32), trace={}))
    assert ids.find("f" * 32) is None
    for number in range(MAX_KNOWN):
        ids.note(replace(REQUEST, request_id=RequestId(f"{number:032x}"), trace=trace.to_headers()))
    assert ids.find(REQUEST.request_id) is None and ids.find(f"{0:032x}") == trace.trace_id
