"""The card of a model whose tokens are bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace_shared.fleet_messages import ModelCard


def _card() -> ModelCard:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return ModelCard(
        model="bytes",
        tokenizer=tokenizer.to_str().encode(),
        vocab_size=300,
        context=100,
        eos_token_ids=(len(alphabet),),
        created=1,
    )


CARD = _card()
