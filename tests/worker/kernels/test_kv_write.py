"""Writing keys and values."""

import pytest
import torch

from headrace_worker.kernels import attention_reference
from headrace_worker.kernels.kv_write import write_kv

FP8 = torch.float8_e4m3fn
NUM_BLOCKS, BLOCK_SIZE = 6, 4


@pytest.mark.parametrize("num_kv_heads,head_dim", [(1, 16), (3, 80), (2, 256)])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_keys_and_values_go_to_their_slots(
    num_kv_heads: int, head_dim: int, is_fp8: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (NUM_BLOCKS, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    before = torch.randn(sizes, generator=generator).to(FP8 if is_fp8 else torch.float16).to(device)
    scales = torch.tensor([0.5, 3.0]).repeat_interleave(num_kv_heads).view(2, -1).to(device) if is_fp8 else None
    wide = 200 * torch.randn((7, 2 * num_kv_heads + 3, head_dim), generator=generator)
    keys_values = wide.half().to(device)[:, 3:]
    slots = torch.tensor([23, 0, 5, 4, 9, 10, 16], device=device)
    pages, expected = before.clone(), before.clone()
    write_kv(keys_values, slots, pages, scales)
    attention_reference.write_kv(keys_values, slots, expected, scales)
    assert torch.equal(pages.view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(pages.view(torch.uint8), before.view(torch.uint8))


def test_every_rounding_to_8_bits_is_torchs(device: torch.device) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()]
    neighbours = torch.sort(numbers).values
    ties = (neighbours[1:] + neighbours[:-1]) / 2
    near = torch.cat([ties * (1 - 2**-20), ties * (1 + 2**-20), ties])
    extreme = torch.tensor([449.0, -500.0, 1e30, torch.inf, -torch.inf, 1e-30, -1e-38, -0.0])
    values = torch.cat([numbers, near, extreme])
    values = torch.nn.functional.pad(values, (0, -values.shape[0] % 32)).view(-1, 2, 16).to(device)
    pages = torch.zeros((values.shape[0], 2, 1, 1, 16), dtype=torch.uint8, device=device).view(FP8)
    slots = torch.arange(values.shape[0], device=device)
    write_kv(values, slots, pages, torch.ones((2, 1), device=device))
    expected = values.clamp(-448, 448).to(FP8).view(torch.uint8)
    assert torch.equal(pages.view(torch.uint8).view(-1, 2, 16), expected)


def test_nan_stays_nan_in_8_bits(device: torch.device) -> None:
    pages = torch.zeros((1, 2, 1, 1, 16), dtype=torch.uint8, device=device).view(FP8)
    values = torch.full((1, 2, 16), torch.nan, device=device)
    write_kv(values, torch.zeros(1, dtype=torch.int64, device=device), pages, torch.ones((2, 1), device=device))
    assert pages.float().isnan().all()


def test_nothing_else_is_taken(device: torch.device) -> None:
    keys_values = torch.zeros((3, 4, 16), device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    pages = torch.zeros((2, 2, 2, 4, 16), device=device)
    scales = torch.ones((2, 2), device=device)
    write_kv(keys_values[:0], slots[:0], pages)
    for arguments in (
        (keys_values.half(), slots, pages),
        (keys_values[:, :3], slots, pages),
        (keys_values[:, :2], slots, pages),
        (keys_values, slots[:2], pages),
        (keys_values, slots.int(), pages),
        (keys_values, slots, pages.transpose(2, 3)),
        (keys_values, slots, pages, scales),
        (keys_values, slots, pages.to(FP8)),
        (keys_values, slots, pages.to(FP8), scales[:1]),
    ):
        with pytest.raises(ValueError):
            write_kv(*arguments)
