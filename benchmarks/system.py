"""What only the broker knows of a running system."""

from tokenizers import Tokenizer

from headrace_shared.broker_permissions import Role
from headrace_shared.model_cards import load_card
from tests.e2e.launcher import Launched


async def tokenizer_of(system: Launched, model: str = "smollm2-135m") -> Tokenizer:
    bus = await system.bus(Role.OPERATOR)
    try:
        card = await load_card(bus, model)
        assert card is not None, model
        return Tokenizer.from_buffer(card.tokenizer)
    finally:
        await bus.close()
