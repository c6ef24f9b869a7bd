from headrace_shared.codec import pack_ids
from headrace_shared.messages import Request, RequestId, RouterId, SamplingParams, StopParams
from headrace_worker.timing.tokens import TokenStream

VOCAB = 49_152
STOP = 2


def request(prompt: list[int], *, seed: int = 1, temperature: float = 1.0, min_tokens: int = 0) -> Request:
    return Request(
        request_id=RequestId("r"),
        router=RouterId("router"),
        model="m",
        prompt=pack_ids(prompt),
        sampling=SamplingParams(seed=seed, temperature=temperature),
        stop=StopParams(max_tokens=1000, min_tokens=min_tokens, stop_token_ids=(STOP,)),
    )


def tokens(of: Request, choice: int = 0, mean: int = 0, count: int = 200) -> list[int]:
    stream = TokenStream(of, choice, VOCAB, mean)
    return [stream.token(index) for index in range(count)]


def test_any_token_follows_from_seed_choice_and_index_alone() -> None:
    whole = tokens(request([1, 2, 3], seed=7))
    stream = TokenStream(request([9], seed=7), 0, VOCAB, 0)
    assert [stream.token(index) for index in reversed(range(200))] == whole[::-1]
    assert whole != tokens(request([1, 2, 3], seed=8)) and whole != tokens(request([1, 2, 3], seed=7), choice=1)


def test_greedy_answers_follow_from_the_prompt_alone() -> None:
    greedy = [tokens(request([1, 2, 3], seed=seed, temperature=0.0), choice) for seed, choice in ((1, 0), (2, 1))]
    assert greedy[0] == greedy[1] != tokens(request([1, 2, 4], temperature=0.0))


def test_tokens_are_ordinary_ones_of_the_vocabulary() -> None:
    for vocab_size in (2, 256, VOCAB):
        stream = TokenStream(request([1]), 0, vocab_size, 0)
        assert all(0 <= stream.token(index) < vocab_size for index in range(500))
    assert STOP not in tokens(request([1]), count=5000)


def test_answers_end_early_with_the_mean_that_was_asked_for() -> None:
    lengths = [tokens(request([1], seed=seed), mean=50, count=1000).index(STOP) for seed in range(300)]
    assert 35 < sum(lengths) / len(lengths) < 70
    assert min(lengths) < 10


def test_no_answer_ends_before_its_least_length() -> None:
    for seed in range(50):
        assert tokens(request([1], seed=seed, min_tokens=100), mean=10, count=400).index(STOP) >= 100
