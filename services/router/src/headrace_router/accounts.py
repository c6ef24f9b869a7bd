"""What the callers use, kept with the other routers in the broker: the shell around `account` and `rate_limits`.

Most calls find what they need in what was taken before and cost nothing here. The others take from the record in the
broker by compare-and-set, with what all that wait need and a share more, so that a crowd costs one message.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from headrace_router.account import Account
from headrace_router.identity import Identity
from headrace_router.presence import Presence
from headrace_router.rate_limits import AccountRecord, Amounts, Refusal, Taken, charge, limited, take, too_much
from headrace_shared.api_keys import ApiKey
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import (
    BusError,
    BusUnavailable,
    LimitReached,
    OutcomeUnknown,
    ProtocolError,
    RevisionConflict,
)
from headrace_shared.subjects import ACCOUNTS, bucket_stream

MAX_ATTEMPTS = 16
"""Of a compare-and-set. Each failure means that another router succeeded."""
TIDY_S = 0.5
CLOCK_S = 30.0
"""Between two looks at the broker's clock, and for records of keys that are gone."""

log = structlog.get_logger(__name__)


class CallSize(NamedTuple):
    """How many requests a call counts as."""

    num_sequences: int = 1
    """Each prompt or input times the answers to it."""
    num_at_once: int = 1
    """Of them that run at the same time."""


SINGLE = CallSize()
NOT_RUN = 1
"""Requests that a call counts as which was not valid, or is answered without running again."""


class Charge:
    """What one call has taken. To be closed in any case."""

    def __init__(self, account: Account | None = None, num_tokens: int = 0, size: CallSize = SINGLE) -> None:
        """Without an account nothing is limited."""
        self._account = account
        self.num_tokens = num_tokens
        self._size = size
        self._num_requests = self._size.num_sequences
        self._is_settled = False

    def settle(self, num_tokens: int, num_requests: int | None = None) -> None:
        """So many tokens were really used, and so many requests; None: all. The last word counts."""
        if self._account is not None:
            num_requests = self._size.num_sequences if num_requests is None else num_requests
            self._account.settle(self.num_tokens - num_tokens, self._num_requests - num_requests)
            self.num_tokens, self._num_requests = num_tokens, num_requests
        self._is_settled = True

    @property
    def is_limited(self) -> bool:
        return self._account is not None

    def detached(self) -> "Charge":
        """For what goes on after the call, which then has nothing to close any more."""
        charge, self._account = Charge(self._account, self.num_tokens, self._size), None
        return charge

    def close(self) -> None:
        """Unless it was settled, nothing was used."""
        if self._account is not None:
            if not self._is_settled:
                self.settle(0, NOT_RUN)
            self._account.leave(self._size.num_at_once)
            self._account = None


class Accounts:
    def __init__(
        self,
        bus: Bus,
        router: str,
        presence: Presence,
        is_known: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_known`: whether there is a key with this id. `now` is a monotonic clock, in seconds."""
        self._bus = bus
        self._router = router
        self._presence = presence
        self._is_known = is_known
        self._now = now
        self._offset = 0.0
        self._measured_at = float("-inf")
        self._accounts: dict[str, Account] = {}
        """Of keys that are in use here."""
        self._records: dict[str, tuple[AccountRecord, int]] = {}
        """As last reported: whoever comes back is refused or let in without a question to the broker."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def open(self) -> None:
        """Returns when all records are known. Raises BusError."""
        await self._bus.ensure_bucket(ACCOUNTS)
        await self._presence.open(self._bus)
        await self._measure()
        await self._bus.watch(ACCOUNTS.name, self._on_change)

    async def begin(self, identity: Identity, num_tokens: int, size: CallSize = SINGLE) -> Charge:
        """A call that uses about so many tokens. Raises LimitReached or BusError."""
        key = identity.key
        if key is None:
            return Charge()
        need = limited(key, Amounts(size.num_sequences, num_tokens, size.num_at_once))
        if need == Amounts():
            return Charge()
        if (refusal := too_much(key, need)) is not None:
            raise _limit_reached(refusal)
        account = self._account(key)
        if not account.try_use(need, self._now(), size.num_at_once):
            await self._take(account, need, size.num_at_once)
        return Charge(account, num_tokens, size)

    def headers(self, identity: Identity) -> list[tuple[bytes, bytes]]:
        """Of the caller's limits now."""
        return [] if identity.key is None else self._account(identity.key).headers(self.clock())

    def leaves_half(self, identity: Identity) -> bool:
        """The caller has at least half of what it may use in a minute: who can wait does so otherwise."""
        return identity.key is None or self._account(identity.key).leaves_half(self.clock())

    def clock(self) -> float:
        """Seconds since the epoch, as the broker would say."""
        return self._now() + self._offset

    async def run(self) -> None:
        """Gives back what is not used, and charges what was used beyond; until cancelled."""
        while True:
            await beat(TIDY_S)
            if not self._bus.is_connected:
                continue
            try:
                if self._now() - self._measured_at > CLOCK_S:
                    await self._measure()
                    self._records = {key: seen for key, seen in self._records.items() if self._is_known(key)}
                await self._tidy(is_closing=False)
            except BusError as error:
                log.info("accounts not in order yet", error=str(error))

    async def close(self) -> None:
        """Gives back everything, if that can be done at once."""
        try:
            async with asyncio.timeout(1.0):
                await self._tidy(is_closing=True)
        except (BusError, TimeoutError) as error:
            log.info("accounts not given back", error=str(error))

    async def _tidy(self, *, is_closing: bool) -> None:
        for key_id, account in list(self._accounts.items()):
            lock = self._locks[key_id]
            # Whoever holds the lock sees to the write.
            is_left = account.write is not None and not lock.locked()
            if is_left or not self._is_in_order(account, is_closing=is_closing):
                async with lock:
                    await self._give_back(account, is_closing=is_closing)
            if account.is_unused and not lock.locked():
                del self._accounts[key_id], self._locks[key_id]

    async def _take(self, account: Account, need: Amounts, num_at_once: int) -> None:
        account.wanted = account.wanted.plus(need)
        try:
            self._refuse_at_once(account, need)
            async with self._locks[account.key.key_id]:
                for _ in range(MAX_ATTEMPTS):
                    if account.try_use(need, self._now(), num_at_once):
                        return
                    if account.write is None:
                        taken = self._try_take(account, account.lacking(need), account.extra(need))
                        account.begin(_signed(taken.record), taken.amounts)
                    await self._send(account)
        finally:
            account.wanted = account.wanted.minus(need)
        raise BusUnavailable("too many routers change this account")

    def _refuse_at_once(self, account: Account, need: Amounts) -> None:
        """Whoever is refused by what is known costs nothing. Not while others of us are about to get more."""
        if not self._locks[account.key.key_id].locked():
            self._try_take(account, account.lacking(need), Amounts())

    def _try_take(self, account: Account, need: Amounts, extra: Amounts) -> Taken:
        now = self.clock()
        record, is_alive = account.current(self._router), self._presence.is_alive
        taken = take(record, account.key, need, extra, router=self._router, is_alive=is_alive, now=now)
        if isinstance(taken, Refusal):
            raise _limit_reached(taken)
        return taken

    async def _give_back(self, account: Account, *, is_closing: bool) -> None:
        for _ in range(MAX_ATTEMPTS):
            if account.write is None:
                if self._is_in_order(account, is_closing=is_closing):
                    return
                amounts = Amounts().minus(account.surplus(self._now(), is_closing=is_closing))
                record = charge(account.current(self._router), account.key, amounts, self._router, self.clock())
                account.begin(_signed(record), amounts)
            await self._send(account)

    def _is_in_order(self, account: Account, *, is_closing: bool) -> bool:
        is_balanced = account.surplus(self._now(), is_closing=is_closing) == Amounts()
        return is_balanced and account.has_slots_of(self._router)

    async def _send(self, account: Account) -> None:
        """Sends the account's write, or one whose fate is unknown again: it can be made only once. Raises BusError.
        Unless it is known then what became of it, it stays the account's."""
        write, key_id = account.write, account.key.key_id
        if write is None:
            return
        was_doubtful, write.is_doubtful = write.is_doubtful, True
        try:
            if write.revision:
                revision = await self._bus.update(ACCOUNTS.name, key_id, encode(write.record), write.revision)
            else:
                revision = await self._bus.create(ACCOUNTS.name, key_id, encode(write.record))
        except (RevisionConflict, OutcomeUnknown) as error:
            is_conflict = isinstance(error, RevisionConflict)
            write.is_doubtful = was_doubtful or not is_conflict
            await self._look(account, is_conflict=is_conflict)
            if account.write is write and (account.revision != write.revision or not write.is_doubtful):
                account.not_made()
        except BusError:
            write.is_doubtful = was_doubtful
            if account.write is write and not was_doubtful:
                account.not_made()
            raise
        else:
            if account.write is write:
                account.made()
            account.see(write.record, revision)

    async def _look(self, account: Account, *, is_conflict: bool) -> None:
        """At what is in the broker now. Raises BusError."""
        await asyncio.sleep(random.uniform(0.0, 0.005))
        entry = await self._bus.get(ACCOUNTS.name, account.key.key_id)
        if entry is not None:
            account.see(*_record_of(entry))
        elif is_conflict:
            account.record, account.revision = AccountRecord(), 0  # it expired

    def _account(self, key: ApiKey) -> Account:
        account = self._accounts.get(key.key_id)
        if account is None:
            account = self._accounts[key.key_id] = Account(key, self._now())
            self._locks[key.key_id] = asyncio.Lock()
            record, revision = self._records.get(key.key_id, (AccountRecord(), 0))
            account.see(record, revision)
        account.key = key  # its limits may have changed
        return account

    def _on_change(self, entry: Entry | None, key: str) -> None:
        account = self._accounts.get(key)
        if entry is None:
            self._records.pop(key, None)
            return
        seen = _record_of(entry)
        self._records[key] = seen
        if account is not None:
            account.see(*seen)

    async def _measure(self) -> None:
        before = self._now()
        told = await self._bus.clock(bucket_stream(ACCOUNTS.name))
        self._measured_at = self._now()
        self._offset = told - (before + self._measured_at) / 2


def _signed(record: AccountRecord) -> AccountRecord:
    return replace(record, write_id=random.getrandbits(62) + 1)


def _record_of(entry: Entry) -> tuple[AccountRecord, int]:
    try:
        return decode(entry.value, AccountRecord), entry.revision
    except ProtocolError as error:
        log.error("undecodable account: it begins anew", key_id=entry.key, error=str(error))
        return AccountRecord(), entry.revision


_WORDS = {
    "requests": "The limit of requests a minute is reached.",
    "tokens": "The limit of tokens a minute is reached.",
    "day": "The limit of tokens a day is reached.",
    "concurrent": "As many requests are running as this API key may have at once.",
}


_FINAL_WORDS = {
    "requests": "ask for fewer answers or inputs at a time, each of which counts as a request.",
    "tokens": "ask for fewer tokens.",
    "day": "ask for fewer tokens.",
    "concurrent": "ask for fewer answers at a time.",
}


def _limit_reached(refusal: Refusal) -> LimitReached:
    if refusal.is_final:
        message = f"This request alone exceeds what the API key may use; {_FINAL_WORDS[refusal.limit]}"
        return LimitReached(message, retry_after_s=refusal.retry_after_s, code="request_exceeds_limit")
    code = "insufficient_quota" if refusal.limit == "day" else "rate_limit_exceeded"
    return LimitReached(_WORDS[refusal.limit], retry_after_s=refusal.retry_after_s, code=code)
