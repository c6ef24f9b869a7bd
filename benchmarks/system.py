"""What only the broker knows of a running system."""

from tokenizers import Tokenizer

from headrace_shared.model_cards import load_card
from headrace_shared.nats_bus import NatsBus
from tests.e2e.launcher import Launched


async def tokenizer_of(system: Launched, model: str = "smollm2-135m") -> Tokenizer:
    bus = await NatsBus.connect([system.nats_url()], name="benchmark", on_closed=lambda: None)
    try:
        card = await load_card(bus, model)
        assert card is not None, model
        return Tokenizer.from_buffer(card.tokenizer)
    finally:
        await bus.close()
