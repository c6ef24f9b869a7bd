"""The time model against arithmetic on data sheets, and against what engines on such GPUs are known to reach."""

import pytest

from headrace_shared.errors import ConfigError
from headrace_worker.timing.hardware import GPUS, find_gpu
from headrace_worker.timing.roofline import OVERHEAD_S, Roofline, work_of
from headrace_worker.timing.shapes import MODELS, find_shape


def roofline(gpu: str = "h100", model: str = "llama-3.1-8b", num_gpus: int = 1, bits: int = 16) -> Roofline:
    return Roofline(find_gpu(gpu), find_shape(model), num_gpus, bits)


def decoding(num_sequences: int, context: int) -> list[tuple[int, int]]:
    return [(context, 1)] * num_sequences


def test_one_sequence_decodes_as_fast_as_the_weights_are_read() -> None:
    for gpu, tokens_per_s in (("h100", 209), ("h200", 299)):
        limit = 1 / (roofline(gpu).weight_bytes / find_gpu(gpu).bandwidth)
        assert limit == pytest.approx(tokens_per_s, rel=0.01)
        assert 0.65 * limit < 1 / roofline(gpu).iteration_s(work_of(decoding(1, 100))) < 0.8 * limit


def test_a_prompt_takes_its_operations() -> None:
    model = roofline()
    seconds = model.iteration_s(work_of([(0, 2048)])) - OVERHEAD_S
    assert seconds == pytest.approx(2 * 8.03e9 * 2048 / (989e12 * 0.6), rel=0.05)  # and a little attention


def test_attention_makes_later_chunks_of_a_prompt_slower() -> None:
    model = roofline()
    first, later = (model.iteration_s(work_of([(start, 2048)])) for start in (0, 100_000))
    assert later > 1.5 * first


def test_a_batch_decodes_more_tokens_in_about_the_same_time_until_its_cache_is_what_is_read() -> None:
    model = roofline()
    one, many, long = (model.iteration_s(work_of(decoding(*of))) for of in ((1, 100), (64, 100), (64, 4000)))
    assert many < 1.2 * one and long > 2 * many


def test_throughput_is_about_that_of_a_real_engine() -> None:
    """A published sweep of vLLM with this model on an A100 of 40 GB, 1,024 tokens in and 128 out: about 75 tokens a
    second alone, and 6.6 times that with eight at a time."""
    model = roofline("a100-40g")

    def tokens_per_s(num_sequences: int) -> float:
        decode_s = model.iteration_s(work_of(decoding(num_sequences, 1088)))
        prefill_s = model.iteration_s(work_of([(0, 1024)]))
        return num_sequences * 128 / (128 * decode_s + num_sequences * prefill_s)

    assert 60 < tokens_per_s(1) < 85
    assert 5 < tokens_per_s(8) / tokens_per_s(1) < 7.5


def test_more_gpus_are_faster_but_not_so_many_times() -> None:
    one, two = (roofline(num_gpus=count).iteration_s(work_of(decoding(1, 100))) for count in (1, 2))
    assert 1.3 < one / two < 2


def test_the_cache_is_what_the_weights_leave() -> None:
    blocks = roofline().num_blocks(16, 0.9)
    assert blocks * 16 * 131_072 + roofline().weight_bytes < 80e9 * 0.9
    assert blocks > 20_000
    assert roofline(bits=8).num_blocks(16, 0.9) > blocks


def test_a_model_too_large_for_the_gpus_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"llama-3.1-70b needs 141 GB for weights on each of 1 h100 of 80 GB"):
        roofline(model="llama-3.1-70b").num_blocks(16, 0.9)
    assert roofline(model="llama-3.1-70b", num_gpus=4).num_blocks(16, 0.9) > 10_000


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h100"):
        find_gpu("h999")
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        find_shape("llama-9")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_time_grows_with_work_on_every_gpu(gpu: str, model: str) -> None:
    of = roofline(gpu, model)
    times = [of.iteration_s(work_of([(0, count)])) for count in (1, 256, 2048, 8192)]
    assert times == sorted(times) and times[0] > OVERHEAD_S
