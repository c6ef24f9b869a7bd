"""A prepared call as its client may see it. Pure."""

from typing import Any

from headrace_router.preparation import Prepared
from headrace_router.requests import EncodedPrompt
from headrace_shared.codec import unpack_ids


def rendered(prepared: Prepared) -> list[dict[str, Any]]:
    """One object for each prompt."""
    return [_rendered(prepared, prompt) for prompt in prepared.encoded]


def _rendered(prepared: Prepared, prompt: EncodedPrompt) -> dict[str, Any]:
    params, sampling, stop = prepared.params, prepared.params.sampling, prompt.stop
    ids = unpack_ids(prompt.ids).tolist()
    return {
        "model": prepared.model.card.model,
        "prompt": prepared.model.encoder.decode(ids),
        "token_ids": ids,
        "sampling_params": {
            "n": params.num_choices,
            "seed": sampling.seed if params.has_seed else None,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": unpack_ids(sampling.allowed_token_ids).tolist() or None,
            "bad_words_token_ids": sampling.bad_words or None,
            "logprobs": sampling.num_logprobs,
            "logprob_token_ids": sampling.logprob_token_ids or None,
            "prompt_logprobs": sampling.num_prompt_logprobs,
            "max_tokens": 0 if params.max_tokens == 0 else stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop": params.stop_strings,
            "stop_token_ids": stop.stop_token_ids,
            "include_stop_str_in_output": params.include_stop,
            "skip_special_tokens": params.skip_special_tokens,
            "grammar": sampling.grammar or None,
        },
    }
