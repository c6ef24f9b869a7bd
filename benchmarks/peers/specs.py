"""How each server is started: the best settings known for two cores, not the defaults, where the two differ."""

import os
import sys
from pathlib import Path

from benchmarks.peers.server import ServerSpec
from benchmarks.peers.weights import MODEL, checkpoint_folder, gguf_file

OURS = ("headrace", "headrace-int8", "headrace-int4")
PEERS = ("vllm", "llama-bf16", "llama-q4_0")


def find_root() -> Path:
    """Where peers/setup.sh installed them."""
    return Path(os.environ.get("HEADRACE_BENCH", "~/.cache/headrace-bench")).expanduser()


def make_spec(name: str, root: Path) -> ServerSpec:
    """Raises FileNotFoundError if the peer is not installed, KeyError for an unknown name."""
    if name in OURS:
        quantization = name.removeprefix("headrace").removeprefix("-") or "none"
        return ServerSpec(
            name,
            [sys.executable, "-m", "headrace_cli", "up", "--port", "{port}", "--data-dir", "{folder}/data"],
            MODEL,
            {"HEADRACE_QUANTIZATION": quantization, "HEADRACE_NATIVE": "auto"},
            "bf16" if quantization == "none" else quantization,
        )
    if name == "vllm":
        return _vllm(root)
    return _llama(root, {"llama-bf16": "BF16", "llama-q4_0": "Q4_0"}[name])


def _vllm(root: Path) -> ServerSpec:
    binary = _installed(root / "vllm" / "bin" / "vllm")
    cores = sorted(os.sched_getaffinity(0))
    preload = [path for pattern in _PRELOADED for path in _found(root, pattern)]
    return ServerSpec(
        "vllm",
        [
            *(str(binary), "serve", str(checkpoint_folder(root)), "--served-model-name", "m", "--dtype", "bfloat16"),
            *("--max-model-len", "2048", "--max-num-seqs", "32", "--port", "{port}", "--host", "127.0.0.1"),
        ],
        "m",
        {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Its default leaves one core of two to the API server, and is half as fast.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "LD_PRELOAD": ":".join(preload),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        "bf16",
    )


_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""What its documentation advises, where it is there."""


def _found(root: Path, name: str) -> list[str]:
    places = [Path("/usr/lib"), root / "vllm" / "lib"]
    return [str(path) for place in places for path in sorted(place.rglob(name))][:1]


def _llama(root: Path, kind: str) -> ServerSpec:
    binaries = sorted((root / "llama").rglob("llama-server"), key=lambda path: path.stat().st_size)
    if not binaries:
        raise FileNotFoundError(f"no llama-server in {root}: run benchmarks/peers/setup.sh")
    threads = str(len(os.sched_getaffinity(0)))
    return ServerSpec(
        f"llama-{kind.lower()}",
        [
            *(str(binaries[-1]), "-m", str(gguf_file(root, kind)), "--threads", threads, "--threads-batch", threads),
            # Repacked for AMX, 4-bit weights crash it (11434.0.0).
            *(("--no-repack",) if kind == "Q4_0" else ()),
            *("--parallel", "32", "--ctx-size", "32768", "--cont-batching", "--no-webui"),
            *("--port", "{port}", "--host", "127.0.0.1"),
        ],
        "m",
        {},
        kind.lower(),
    )


def _installed(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: run benchmarks/peers/setup.sh")
    return path
