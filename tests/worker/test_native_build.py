import os
from pathlib import Path

import pytest
import torch

from headrace_worker.native import build
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.library import Library
from headrace_worker.native.linear import pack_weight, packed_linear
from tests.worker.native_variants import library


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that writes a file, and a line in `calls` for each one."""
    calls = tmp_path / "calls"
    body = f'[ "$1" = --version ] && exit\necho >> {calls}\nfor last; do :; done\necho > "$last"'
    monkeypatch.setenv("CXX", str(_script(tmp_path / "compiler", body)))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return calls


def test_compiles_once(compiler: Path) -> None:
    first = build.built_library()
    assert build.built_library() == first
    assert first.exists()
    assert compiler.read_text() == "\n"
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_compiles_anew_for_another_compiler_or_processor(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.built_library()
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    second = build.built_library()
    monkeypatch.setattr(build, "_compiler_version", lambda _: "2")
    third = build.built_library()
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("size", [0, 1, 4096, -1])
def test_what_is_left_of_a_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of a library that is cut off, the loader maps what is not there: the process dies of SIGBUS."""
    source = Path(library("native").functions._name)
    body = f'[ "$1" = --version ] && exit\nfor last; do :; done\ncp {source} "$last"'
    monkeypatch.setenv("CXX", str(_script(tmp_path / "compiler", body)))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    built = build.built_library()
    complete = built.read_bytes()
    built.write_bytes(complete[:size])
    assert build.built_library() == built
    assert built.read_bytes() == complete
    Library(built)


def test_a_cache_that_cannot_be_looked_into_is_no_disaster(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/" + "x" * 300)
    with pytest.raises(NativeUnavailable, match="cannot use"):
        build.built_library()


def test_says_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_script(tmp_path / "broken", "echo no such header >&2; exit 1")))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="no such header"):
        build.built_library()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        build.built_library()


def test_a_cache_that_cannot_be_written_is_no_disaster(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeUnavailable, match="cannot use"):
        build.built_library()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_text("nothing")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        Library(tmp_path / "kernels.so")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_shares_the_threads_of_torch() -> None:
    weight = torch.randn(512, 512).bfloat16()
    packed = pack_weight(weight, library("native"))
    rows = torch.randn(64, 512).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.nn.functional.linear(rows, weight)
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            packed_linear(rows, packed)
            torch.nn.functional.linear(rows, weight)
        assert len(os.listdir("/proc/self/task")) == before
    finally:
        torch.set_num_threads(threads)
