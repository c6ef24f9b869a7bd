"""Kernels run on the GPU where there is one, and under Triton's interpreter elsewhere."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# There is no Triton outside Linux.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]

# Triton reads the variable when a function is decorated, so it must be set before the first import of triton or of a
# kernel; left set for the session, since the interpreter reads it again at each launch.
if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET was set: its own functions would be compiled")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of infinities that are right on a GPU and right here."""
    with np.errstate(all="ignore"):
        yield
