"""The generating endpoints: calls that begin, and clients that come back to one that was begun before.

A call is *held* if its client may come back: it asked for a resumable stream, gave an idempotency key, or wants the
answer in the background. Held calls leave a record that every router can go on from.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from headrace_router.accounts import Accounts, CallSize
from headrace_router.bodies import Body
from headrace_router.call import Call, Plan
from headrace_router.call_meter import CHAT, COMPLETION, EMBEDDINGS
from headrace_router.call_options import IDEMPOTENCY_KEY, RESUMABLE, CallOptions, read_options
from headrace_router.call_record import CallRecord, Dialect, prompts_of, record_of
from headrace_router.call_status import CallStatus
from headrace_router.call_store import CallStore, IdempotencyKey, KeyEntry
from headrace_router.cancellation import Canceller, QueuedRequest
from headrace_router.client_fields import tier_of
from headrace_router.embedding_answers import answer_in_pieces
from headrace_router.embedding_pieces import pieces_for
from headrace_router.gate import Gate
from headrace_router.identity import Identity
from headrace_router.inflight import Mailbox
from headrace_router.models import Models
from headrace_router.positions import parse_position
from headrace_router.preparation import Endpoint, Parsed, Prepared, Preparer
from headrace_router.prompt_size import PromptSize
from headrace_router.requests import Terms, make_prompts
from headrace_router.runner import CallSettings, EndedWithoutAnswer, Runner
from headrace_router.submission import submit
from headrace_router.validation import CONTEXT_EXCEEDED
from headrace_shared.bus import Bus
from headrace_shared.errors import InvalidRequest, Overloaded
from headrace_shared.messages import Audience, CancelReason, Lane, Request, RequestId, RouterId

MAX_CLAIMS = 4
"""Attempts to get an idempotency key that others want at the same time."""
LAG_S = 0.1
"""A broker of a cluster may answer before it knows what another one has stored."""

MAX_QUESTIONS = 256
"""About prompts, of one owner, at a time: a quarter of the places of `PromptPool`."""

CHARS_PER_TOKEN = 4.0
EXPECTED_OUTPUT_TOKENS = 256
"""Where the client does not say how many it wants."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


class Caller:
    """Answers calls. Whatever it raises, it raises before the first byte of an answer, but for a cut stream."""

    def __init__(
        self,
        *,
        bus: Bus,
        router: RouterId,
        models: Models,
        preparer: Preparer,
        gate: Gate,
        accounts: Accounts,
        canceller: Canceller,
        store: CallStore,
        runner: Runner,
        status: CallStatus,
        settings: CallSettings,
    ) -> None:
        self._bus = bus
        self._router = router
        self._models = models
        self._preparer = preparer
        self._gate = gate
        self._accounts = accounts
        self._canceller = canceller
        self._store = store
        self._runner = runner
        self._status = status
        self._limits = settings.limits
        self._shares_cache = settings.shares_cache
        self._num_questions: Counter[str] = Counter()

    @property
    def num_active(self) -> int:
        return self._runner.num_active

    async def chat(self, call: Call, given: Body) -> None:
        self.admit(call, is_chat=True)
        await self.begin(call, await self._preparer.parse(Endpoint.CHAT, given))

    async def completion(self, call: Call, given: Body) -> None:
        self.admit(call, is_chat=False)
        await self.begin(call, await self._preparer.parse(Endpoint.COMPLETION, given))

    def admit(self, call: Call, *, is_chat: bool) -> None:
        """Before any work is done for a call that begins. Raises Overloaded."""
        self._observe(call, CHAT if is_chat else COMPLETION)
        self._runner.admit()

    @contextlib.asynccontextmanager
    async def question(self, identity: Identity) -> AsyncIterator[None]:
        """Around work on a prompt that gets no answer: it counts as a request, and takes the same threads as paid
        ones. Raises Overloaded, LimitReached, BusError."""
        self._runner.admit()
        owner = identity.owner
        if self._num_questions[owner] >= MAX_QUESTIONS:
            raise Overloaded("Too many prompts of yours are being tokenized.", retry_after_s=1.0)
        self._num_questions[owner] += 1
        try:
            charge = await self._accounts.begin(identity, 0)
            try:
                yield
            finally:
                charge.close()
        finally:
            self._num_questions[owner] -= 1
            if not self._num_questions[owner]:
                del self._num_questions[owner]

    async def begin(self, call: Call, parsed: Parsed, *, is_trial: bool = False) -> None:
        """Of a call that was admitted. InvalidRequest is raised before anything of it is queued, but for a form of the
        answer that turns out to be too complex on the way. `is_trial`: one that does not fit will begin once more, in
        another form, and counts only then."""
        options = read_options(call.headers)
        if options.is_resumable and parsed.wording.dialect is not Dialect.OPENAI:
            raise InvalidRequest(f"The header {RESUMABLE} is not supported here.", param=RESUMABLE)
        call.identity.check_model(parsed.model)
        if parsed.body.service_tier == "flex":
            options = options._replace(lane=Lane.BATCH)
        size = parsed.size
        of_call = CallSize(size.num_choices, size.num_choices)
        charge = await self._accounts.begin(call.identity, _expected_tokens(size), of_call)
        try:
            await self._begin_paid(call._replace(charge=charge), parsed, options)
        except InvalidRequest as error:
            if is_trial and error.code == CONTEXT_EXCEEDED:
                charge.settle(0, 0)
            raise
        finally:
            charge.close()

    async def repeated(self, call: Call, parsed: Parsed) -> RequestId | None:
        """The call that this one repeats, by its idempotency key. Raises RequestError or BusError."""
        given_key = read_options(call.headers).idempotency_key
        if given_key is None:
            return None
        found = await self._store.find(IdempotencyKey(call.identity.owner, given_key, parsed.given.digest))
        return None if found is None else found.entry.request_id

    async def embedding(self, call: Call, given: Body) -> None:
        self._observe(call, EMBEDDINGS)
        self._runner.admit()
        parsed = await self._preparer.parse(Endpoint.EMBEDDING, given)
        call.identity.check_model(parsed.model)
        options = read_options(call.headers)
        timeout_s = min(self._limits.request_timeout_s, options.timeout_s or float("inf"))
        size, pieces = parsed.size, [parsed]
        if size.num_prompts > 1:
            model = await self._models.find(parsed.model, timeout_s)
            cut = partial(pieces_for, parsed, model.card, call.identity)
            pieces = await self._preparer.apart_if_long(given, cut)
        if len(pieces) == 1:
            await self.begin(call, parsed)
            return
        of_call = CallSize(size.num_choices, pieces[0].size.num_choices)
        charge = await self._accounts.begin(call.identity, _expected_tokens(size), of_call)
        try:
            until = call.arrived_at + timeout_s
            await answer_in_pieces(call._replace(charge=charge), parsed, pieces, options, self._begin_paid, until)
        finally:
            charge.close()

    async def resume(self, call: Call, request_id: str) -> None:
        """The rest of the answer to a held call, in the form that was asked for then."""
        options = read_options(call.headers)
        self._runner.admit()
        record = await self._record_of(call.identity.owner, request_id)
        kind = CHAT if record.form.is_chat else COMPLETION
        self._observe(
            call, EMBEDDINGS if record.form.dialect is Dialect.EMBEDDINGS else kind, origin=record.requests[0]
        )
        await self._runner.run(call, self._continue(record, options, sends_ids=record.form.dialect is Dialect.OPENAI))

    def check_readable(self, record: CallRecord) -> None:
        """Raises Overloaded or ModelNotFound if this router cannot follow that call now: that says nothing of it."""
        self._runner.admit()
        self._models.asked_by(record.requests[0])

    async def follow(self, call: Call, record: CallRecord, starting_after: int = -1) -> None:
        """The answer to a call that was begun before, as `record` says that it is written."""
        self._observe(call, CHAT, origin=record.requests[0])
        self._runner.admit()
        plan = self._continue(record, CallOptions(), sends_ids=False)
        await self._runner.run(call, plan._replace(starting_after=starting_after))

    async def status(self, identity: Identity, request_id: str) -> dict[str, Any]:
        """Of a call that this router answers, or of a held one. Raises InvalidRequest or BusError."""
        known = self._status.of_active(identity.owner, request_id)
        if known is None:
            known = await self._status.of_record(await self._record_of(identity.owner, request_id))
        return known

    async def cancel(self, identity: Identity, request_id: str) -> str:
        """Ends a held call for good. Returns what becomes of it: `cancelling`, or how it had ended before. Raises
        InvalidRequest or BusError."""
        record = await self._record_of(identity.owner, request_id)
        ended = await self._status.end_of(record)
        if ended is not None:
            return ended
        for request in record.requests:
            self._canceller.abort(QueuedRequest(request, None, has_started=True), CancelReason.CLIENT)
        return "cancelling"

    def abort(self, owner: str, name: str) -> None:
        """Ends a call that this router answers, held or not. `name`: its id, or the one that is shown."""
        active = self._runner.active.find(owner, name)
        for prompt in active.plan.prompts if active is not None else ():
            queued = QueuedRequest(prompt.request, prompt.stream_sequence, prompt.has_started)
            self._canceller.abort(queued, CancelReason.CLIENT)

    async def forget(self, owner: str, idempotency_key: str, request_id: str) -> None:
        """The answer has been taken down elsewhere. Raises BusError."""
        await self._store.erase(owner, idempotency_key, RequestId(request_id))

    async def _begin_paid(self, call: Call, parsed: Parsed, options: CallOptions) -> None:
        if options.idempotency_key is not None:
            await self._begin_once(call, parsed, options, options.idempotency_key, parsed.given.digest)
            return
        prepared = await self._prepare(call, parsed, options, secrets.randbits(63))
        plan = self._new(call, options, parsed, prepared)
        parsed.forget()
        await self._runner.run(call, plan)

    async def _prepare(self, call: Call, parsed: Parsed, options: CallOptions, seed: int) -> Prepared:
        """For the model that the call gets. Raises RequestError."""
        began_at = time.monotonic()
        admitted = await self._gate.admit(parsed, call, options)
        try:
            prepared = await self._preparer.prepare(parsed, admitted.model, seed, call.identity.owner)
        except InvalidRequest:
            # What the smaller model cannot take (a long prompt, say) may be right for the one that was asked for.
            if admitted.instead_of is None:
                raise
            admitted = await self._gate.admit(parsed, call, options, may_overflow=False)
            prepared = await self._preparer.prepare(parsed, admitted.model, seed, call.identity.owner)
        self._gate.on_tokenized(parsed, prepared)
        self._trace(call, parsed, prepared, began_at)
        return prepared

    async def _begin_once(
        self, call: Call, parsed: Parsed, options: CallOptions, given_key: str, digest: bytes
    ) -> None:
        key = IdempotencyKey(call.identity.owner, given_key, digest)
        for _ in range(MAX_CLAIMS):
            found = await self._store.find(key)
            if found is not None:
                with contextlib.suppress(EndedWithoutAnswer):
                    await self._repeat(call, parsed, options, found.entry)
                    return
            seed = secrets.randbits(63)
            prepared = await self._prepare(call, parsed, options, seed)
            plan = self._new(call, options, parsed, prepared)
            entry = KeyEntry(
                fingerprint=digest,
                request_id=call.request_id,
                router=self._router,
                seed=seed,
                created=plan.created,
                model=prepared.model.name,
                claimed_at=await self._store.clock(),
            )
            claim = await self._store.claim(key, entry, found)
            if claim is not None:
                parsed.forget()
                await self._runner.run(call, plan, on_refusal=partial(self._store.forget, key, claim))
                return
            await asyncio.sleep(LAG_S)
        raise InvalidRequest(
            f"Others are using this {IDEMPOTENCY_KEY} right now.", param=IDEMPOTENCY_KEY, code="idempotency_key_busy"
        )

    async def _repeat(self, call: Call, parsed: Parsed, options: CallOptions, entry: KeyEntry) -> None:
        """Raises EndedWithoutAnswer if it is worth a new attempt."""
        record = await self._store.load(entry.request_id)
        if record is None:
            if not await self._store.may_queue_again(entry):
                # What runs in the background runs whether or not anybody waits.
                if not parsed.body.background and await self._store.has_come_to_nothing(entry):
                    raise EndedWithoutAnswer
                raise InvalidRequest("The answer is not kept any more.", code="answer_expired")
            # Its router died before it could tell, or is just about to: then the queue stores it only once.
            model = self._models.get(entry.model or parsed.model)
            began_at = time.monotonic()
            prepared = await self._preparer.prepare(parsed, model, entry.seed, call.identity.owner)
            self._trace(call, parsed, prepared, began_at)
            plan = self._new(call, options, parsed, prepared, entry)
            for prompt in plan.prompts:
                await submit(self._bus, prompt, Mailbox(1), self._limits.publish_timeout_s, call.trace)
            record = record_of(call.identity.owner, plan.created, plan.form, plan.prompts)
            await self._store.save(record)
        plan = self._continue(record, options, sends_ids=options.is_resumable)
        await self._runner.run(call, plan, may_begin_anew=True)

    def _trace(self, call: Call, parsed: Parsed, prepared: Prepared, began_at: float) -> None:
        if call.trace is not None:
            call.trace.prepared(prepared.model.name, parsed.body, prepared.params, began_at)

    def _observe(self, call: Call, operation: str, *, origin: Request | None = None) -> None:
        """`origin`: of the call that is continued."""
        call.meter.operation = operation
        if call.trace is not None:
            call.trace.begin(call.meter.operation, origin)
            if origin is not None:
                call.trace.name(origin.model)

    def _new(
        self, call: Call, options: CallOptions, parsed: Parsed, prepared: Prepared, entry: KeyEntry | None = None
    ) -> Plan:
        """`entry`: queued, or to be queued, as that says."""
        model, params, form, encoded = prepared
        is_held = options.is_resumable or options.idempotency_key is not None or params.is_background
        audience = Audience.ATTACHED if is_held else Audience.ROUTER
        timeout_s = min(self._limits.request_timeout_s, options.timeout_s or float("inf"))
        terms = Terms(
            request_id=entry.request_id if entry is not None else call.request_id,
            router=entry.router if entry is not None else self._router,
            trace=(call.trace.context if call.trace is not None else call.context).to_headers(),
            audience=Audience.NONE if params.is_background else audience,
            timeout_s=timeout_s,
            identity=call.identity,
            lane=call.identity.lane(options.lane),
            shares_cache=self._shares_cache,
        )
        if params.asks_tier:
            tier = tier_of(terms.lane, call.identity.priority)
            form = msgspec.structs.replace(form, service_tier=tier)
        prompts = make_prompts(encoded, params, form, model, terms, self._bus.max_payload)
        created = entry.created if entry is not None else int(time.time())
        stream_options = parsed.body.stream_options
        tells_queue = options.queue_events or bool(stream_options and stream_options.include_queue_events)
        return Plan(
            model,
            form,
            prompts,
            created,
            timeout_s,
            is_held,
            options.is_resumable and form.stream,
            tells_queue=tells_queue,
            comments_queue=tells_queue or options.is_person or options.is_resumable,
        )

    def _continue(self, record: CallRecord, options: CallOptions, *, sends_ids: bool) -> Plan:
        model = self._models.asked_by(record.requests[0])
        plan = Plan(
            model,
            record.form,
            prompts_of(record, model),
            record.created,
            # The schedulers know better when its time is up.
            record.requests[0].timeout_s,
            is_held=True,
            sends_ids=sends_ids and record.form.stream,
            follows=True,
            tells_queue=options.queue_events,
            comments_queue=sends_ids or options.is_person,
        )
        if not record.form.stream or options.last_event_id is None or record.form.dialect is not Dialect.OPENAI:
            return plan
        return plan._replace(told=parse_position(options.last_event_id, plan.request_id, plan.num_choices))

    async def _record_of(self, owner: str, request_id: str) -> CallRecord:
        record = None
        if _REQUEST_ID.fullmatch(request_id):
            record = await self._store.load(RequestId(request_id))
            if record is None:
                await asyncio.sleep(LAG_S)
                record = await self._store.load(RequestId(request_id))
        if record is None or record.owner != owner:
            raise InvalidRequest("There is no such request, or not any more.", code="request_not_found")
        return record


def _expected_tokens(size: PromptSize) -> int:
    """Charged until the true number is known."""
    most = EXPECTED_OUTPUT_TOKENS if size.max_tokens is None else size.max_tokens
    return size.num_tokens(CHARS_PER_TOKEN) + size.num_choices * most
