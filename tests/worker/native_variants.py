"""The compiled kernels as this machine has them, and as machines without its newer instructions would."""

import functools

import pytest

from headrace_worker.native.build import built_library
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.library import Library

VARIANTS = {"native": (), "without_amx": ("HEADRACE_WITHOUT_AMX",), "portable": ("HEADRACE_PORTABLE",)}


@functools.cache
def library(variant: str) -> Library:
    try:
        return Library(built_library(VARIANTS[variant]))
    except NativeUnavailable as error:
        pytest.skip(str(error))
