"""One iteration's frame and tail on their way to the device, in one copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.cuda.device import Device
from headrace_worker.cuda.frame import Frame, FrameLayout
from headrace_worker.cuda.tail import Tail

_TAIL_WORDS = 1 << 14


class Upload:
    """`host` is filled, then sent to `frame`, which stays where it is on the device."""

    def __init__(self, layout: FrameLayout, device: Device) -> None:
        self._device = device
        self._words = np.zeros(layout.num_words, dtype=np.int32)
        self._buffer = torch.zeros(layout.num_words + _TAIL_WORDS, dtype=torch.int32, device=device.torch_device)
        self.host: Frame[NDArray[Any]] = layout.arrays(self._words)
        self.frame: Frame[Tensor] = layout.tensors(self._buffer)

    def send(self, tail: Tail) -> list[Tensor]:
        """Returns the tail's arrays on the device, by number; they are good for the work queued until the next call."""
        num_fixed = self._words.shape[0]
        total = num_fixed + tail.num_words
        staging = self._device.staging(total)
        words = staging.numpy()
        words[:num_fixed] = self._words
        tail.write(words[num_fixed:])
        if total <= self._buffer.shape[0]:
            self._buffer[:total].copy_(staging, non_blocking=True)
            return tail.tensors(self._buffer[num_fixed:total])
        self._buffer[:num_fixed].copy_(staging[:num_fixed], non_blocking=True)
        rest = torch.empty(tail.num_words, dtype=torch.int32, device=self._device.torch_device)
        rest.copy_(staging[num_fixed:], non_blocking=True)
        return tail.tensors(rest)
