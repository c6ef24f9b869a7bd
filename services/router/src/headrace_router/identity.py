"""Who calls, as far as it matters: whose requests and answers they are, and in which order they run. Pure."""

import hashlib
from typing import NamedTuple

from headrace_shared.api_keys import ApiKey
from headrace_shared.errors import Forbidden
from headrace_shared.messages import Lane


class Identity(NamedTuple):
    owner: str
    """Stands for who may continue or cancel what was begun, and tells nothing about them."""
    key: ApiKey | None = None
    """None: nobody that we know."""

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant

    @property
    def flow(self) -> int:
        return 0 if self.key is None else self.key.flow

    @property
    def weight(self) -> float:
        return 1.0 if self.key is None else self.key.weight

    @property
    def priority(self) -> int:
        return 0 if self.key is None else self.key.priority.level

    @property
    def overflow(self) -> bool:
        return self.key is not None and self.key.may_overflow

    def lane(self, asked: Lane) -> Lane:
        """Nobody gets out of the batch lane by asking."""
        return asked if self.key is None or self.key.lane is Lane.INTERACTIVE else Lane.BATCH

    def may_ask(self, model: str) -> bool:
        return self.key is None or not self.key.models or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_ask(model):
            raise Forbidden(
                f"This API key may not use the model '{model[:256]}'.", code="model_not_allowed", param="model"
            )

    def cache_salt(self, given: str, *, is_shared: bool) -> str:
        """What a client may give has no NUL, so that nobody can name a tenant's salt. `is_shared`: cached prompts are
        everybody's."""
        return given if is_shared or self.key is None else f"\0{self.key.tenant}\0{given}"


def anonymous(authorization: str) -> Identity:
    """Whoever sends the same header is the same caller."""
    return Identity(hashlib.sha256(authorization.encode()).hexdigest()[:32])


def known(key: ApiKey) -> Identity:
    return Identity("tenant:" + hashlib.sha256(key.tenant.encode()).hexdigest()[:32], key)
