"""Loads and unloads LoRA adapters for whoever has an administrator's key.

A record in the broker says what the workers of a model are to have; each loads it and says in its Hello what came of
it. An adapter can be asked for once the first of them has it, and no other content is ever served under its name until
it is unloaded.
"""

import contextlib
import time
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from headrace_router.adapters import AdapterTable
from headrace_router.admission import retry_after
from headrace_router.call_limits import MAX_ADAPTER_PATH_CHARS
from headrace_router.identity import Identity
from headrace_router.models import Models
from headrace_router.schemas import LoadAdapterBody, UnloadAdapterBody
from headrace_shared.adapter_records import (
    MAX_ADAPTERS,
    StoredAdapter,
    find_adapter,
    is_adapter_name,
    remove_adapter,
    store_adapter,
)
from headrace_shared.bus import Bus
from headrace_shared.errors import (
    BusError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    RevisionConflict,
    ServiceFailure,
)
from headrace_shared.fleet_messages import AdapterRecord
from headrace_shared.subjects import adapter_key

LOAD_TIMEOUT_S = 150.0
"""Longer than a worker takes before it gives up."""
LOOK_S = 1.0

log = structlog.get_logger(__name__)


class AdapterAdmin:
    def __init__(
        self, bus: Bus, models: Models, table: AdapterTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._models = models
        self._table = table
        self._clock = clock

    def check(self, identity: Identity) -> None:
        """Raises Forbidden for whoever may not."""
        if identity.key is None or not identity.key.is_admin:
            raise Forbidden("This needs an API key that was created with --admin.", code="admin_key_required")

    async def load(self, identity: Identity, body: LoadAdapterBody) -> str:
        """Returns when every ready worker of the model has said what came of it: what to tell the caller. Raises
        RequestError or BusError; then nothing is loaded."""
        self.check(identity)
        if not is_adapter_name(body.lora_name):
            raise InvalidRequest("'lora_name' must be a name of at most 128 characters.", param="lora_name")
        if not 1 <= len(body.lora_path) <= MAX_ADAPTER_PATH_CHARS:
            raise InvalidRequest(
                f"'lora_path' must have 1 to {MAX_ADAPTER_PATH_CHARS} characters, relative to the workers' folder of "
                "adapters.",
                param="lora_path",
            )
        if body.load_inplace:
            raise InvalidRequest(
                "An adapter is not replaced while it is served: load the new one under another name.",
                param="load_inplace",
            )
        model = self._model_of(body)
        if self._models.knows(body.lora_name):
            raise _taken(body.lora_name)
        record = AdapterRecord(name=body.lora_name, model=model, path=body.lora_path, created=int(time.time()))
        if self._table.num_of(model) >= MAX_ADAPTERS:
            raise InvalidRequest(f"There are {MAX_ADAPTERS} adapters of '{model}' already.", code="too_many_adapters")
        if not self._table.answers(StoredAdapter(record, 0), self._clock()).num_workers:
            raise Overloaded(
                "No worker is there to load it.", retry_after_s=retry_after(10.0), code="no_worker", status=503
            )
        stored = await self._put(record, await self._abandoned(record.name))
        try:
            return await self._settle(stored)
        except BaseException:
            with contextlib.suppress(BusError):  # also if it has been loaded meanwhile: then it stays
                await remove_adapter(self._bus, stored)
                self._table.forget(adapter_key(record.name))
            raise

    async def unload(self, identity: Identity, body: UnloadAdapterBody) -> str:
        """Requests with it that run already finish. Raises RequestError or BusError."""
        self.check(identity)
        stored = await self._find(body.lora_name) if is_adapter_name(body.lora_name) else None
        if stored is None:
            raise ModelNotFound(body.lora_name[:256])
        try:
            await remove_adapter(self._bus, stored)
        except RevisionConflict as error:
            raise InvalidRequest("Somebody else is changing this adapter.", code="adapter_busy") from error
        self._table.forget(adapter_key(body.lora_name))
        log.info("adapter unloaded", adapter=body.lora_name)
        return f"The adapter '{body.lora_name}' is unloaded."

    def _model_of(self, body: LoadAdapterBody) -> str:
        names = [model.card.model for model in self._models.all()]
        if body.base_model is not None:
            if body.base_model not in names:
                raise ModelNotFound(body.base_model[:256])
            return body.base_model
        if len(names) != 1:
            raise InvalidRequest("'base_model' must say whose adapter it is.", param="base_model")
        return names[0]

    async def _settle(self, stored: StoredAdapter) -> str:
        deadline = self._clock() + LOAD_TIMEOUT_S
        name = stored.record.name
        while True:
            answers = self._table.answers(stored, self._clock())
            if answers.loaded and not stored.record.digest:
                # From here on it can be asked for, and others load just this content.
                stored = await self._put(replace(stored.record, digest=answers.loaded[0]), stored)
                log.info("adapter loaded", adapter=name, digest=stored.record.digest)
                continue
            if answers.is_complete or self._clock() >= deadline:
                if stored.record.digest:
                    return f"The adapter '{name}' is loaded by {len(answers.loaded)} of {answers.num_workers} workers."
                if answers.problems:
                    problem = answers.problems[0]
                    raise InvalidRequest(
                        f"The adapter is not loaded: {problem}.", param="lora_path", code="adapter_refused"
                    )
                raise ServiceFailure("No worker has loaded the adapter in time.", code="adapter_not_loaded")
            await self._models.next_hello(LOOK_S)

    async def _put(self, record: AdapterRecord, known: StoredAdapter | None) -> StoredAdapter:
        try:
            stored = await store_adapter(self._bus, record, known)
        except RevisionConflict as error:
            raise _taken(record.name) from error
        self._table.put(stored)
        return stored

    async def _abandoned(self, name: str) -> StoredAdapter | None:
        """What a router that died while it loaded this name has left on record."""
        stored = await self._find(name)
        if stored is None or stored.record.digest or time.time() - stored.record.created <= LOAD_TIMEOUT_S:
            return None
        log.warning("taking over an adapter that nobody finished to load", adapter=name)
        return stored

    async def _find(self, name: str) -> StoredAdapter | None:
        try:
            return await find_adapter(self._bus, name)
        except ProtocolError as error:
            raise ServiceFailure("The record of the adapter is not readable.") from error


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(f"There is a model or adapter named '{name}' already.", param="lora_name", code="name_taken")
