"""Chooses who writes a call's answer."""

import msgspec

from headrace_router.call import Call, Plan
from headrace_router.call_record import AnswerForm, Dialect
from headrace_router.chunk_writer import ChunkWriter
from headrace_router.embedding_form import EmbeddingForm
from headrace_router.embedding_writer import EmbeddingWriter
from headrace_router.messages_api.writer import PREFIX, MessageFacts, MessageWriter
from headrace_router.positions import Position
from headrace_router.prompt import Prompt
from headrace_router.responses import Formatter, Identity
from headrace_router.responses_api.writing import num_told, response_writer
from headrace_router.shown_prompt import ShownPrompt
from headrace_router.writer import Writer
from headrace_shared.codec import unpack_ids


def make_writer(call: Call, plan: Plan) -> Writer:
    """At the answer's beginning."""
    match plan.form.dialect:
        case Dialect.RESPONSES:
            request = plan.prompts[0].request
            return response_writer(request, plan.form, plan.created, plan.model, plan.starting_after)
        case Dialect.MESSAGES:
            return _message_writer(call, plan)
        case Dialect.EMBEDDINGS:
            return EmbeddingWriter(plan.model.name, msgspec.json.decode(plan.form.about, type=EmbeddingForm))
    return _chunk_writer(plan)


def _chunk_writer(plan: Plan) -> ChunkWriter:
    form = plan.form
    identity = Identity(f"{'chatcmpl' if form.is_chat else 'cmpl'}-{plan.request_id}", plan.created, plan.model.name)
    request = plan.prompts[0].request
    formatter = Formatter(
        identity,
        plan.model.encoder.vocabulary,
        form,
        num_logprobs=num_told(request.sampling),
        prompts=[_shown(form, number, prompt) for number, prompt in enumerate(plan.prompts)],
        num_choices=request.num_choices,
    )
    position = Position(plan.request_id, plan.num_choices) if plan.sends_ids else None
    return ChunkWriter(form, formatter, position, plan.told, plan.num_choices)


def _shown(form: AnswerForm, number: int, prompt: Prompt) -> ShownPrompt:
    text = form.echoes[number] if form.echoes else ""
    return ShownPrompt(text, unpack_ids(prompt.request.prompt) if form.shows_prompts else (), prompt.scores)


def _message_writer(call: Call, plan: Plan) -> MessageWriter:
    (prompt,) = plan.prompts
    facts = MessageFacts(
        PREFIX + plan.request_id,
        call.shown_id,
        plan.model.name,
        prompt.num_tokens,
        msgspec.json.decode(plan.form.about).get("max_tokens"),
    )
    return MessageWriter(facts, plan.form.tools)
