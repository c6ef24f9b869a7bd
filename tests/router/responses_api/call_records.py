"""The record of a call to the Responses API."""

import msgspec

from headrace_router.call_record import AnswerForm, CallRecord, Dialect
from headrace_router.responses_api.response_object import About
from headrace_shared.messages import Lane, Request, RequestId, RouterId, SamplingParams, StopParams

REQUEST_ID = RequestId("1" * 32)


def record() -> CallRecord:
    request = Request(
        request_id=REQUEST_ID,
        router=ROUTER,
        model="m",
        prompt=b"",
        sampling=SamplingParams(seed=1),
        stop=StopParams(max_tokens=1000),
        num_choices=1,
        lane=Lane.INTERACTIVE,
    )
    form = AnswerForm(
        is_chat=True,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        skip_special_tokens=True,
        stop_strings=(),
        include_stop=False,
        dialect=Dialect.RESPONSES,
        about=msgspec.json.encode(About(background=True)),
        by_token=True,
    )
    return CallRecord(
        owner="o", created=5, form=form, requests=(request,), num_prompt_tokens=(3,), stream_sequences=(1,)
    )


ROUTER = RouterId("router-1")
