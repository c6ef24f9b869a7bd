"""flag > environment > YAML > default, and every mistake named as it was written."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from headrace_shared.common_settings import CommonSettings
from headrace_shared.errors import ConfigError
from headrace_shared.settings import Secret, load_settings, parse_int


class Example(CommonSettings, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=1, le=1 << 40)] = 10
    """How large."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """How much."""
    eager: bool = False
    """Whether now."""
    mode: Literal["slow", "fast"] = "slow"
    """Which way, 100 % sure."""
    names: tuple[str, ...] = ()
    """Which ones."""
    limit: int | None = None
    """At most."""


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Example:
    return load_settings(Example, argv, environ or {}, prog="example")


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    assert load() == Example()


def test_precedence(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "size: 2\nratio: 0.25\nmode: fast\nlog_level: debug\n")
    environ = {"HEADRACE_SIZE": "3", "HEADRACE_RATIO": "0.75", "HEADRACE_CONFIG": config}
    settings = load(["--size", "4"], environ)
    assert (settings.size, settings.ratio, settings.mode, settings.log_level) == (4, 0.75, "fast", "debug")
    assert settings.eager is False


def test_the_config_flag_beats_its_variable(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "size: 2\n")
    assert load(["--config", config], {"HEADRACE_CONFIG": "/nowhere"}).size == 2


def test_an_empty_variable_counts_as_unset() -> None:
    assert load(environ={"HEADRACE_SIZE": "", "HEADRACE_MODE": ""}) == Example()


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    assert load(environ={"HEADRACE_HEALTH_PORT": "tcp://10.0.0.1:8000"}) == Example()
    with pytest.raises(ConfigError, match="HEADRACE_HEALTH_PORT"):
        load(environ={"HEADRACE_HEALTH_PORT": "10.0.0.1:8000"})


def test_other_variables_are_nobodys_business() -> None:
    assert load(environ={"HEADRACE_UNKNOWN": "1", "SIZE": "7"}) == Example()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("1k", 1000),
        ("1K", 1000),
        ("25.6k", 25_600),
        ("1KiB", 1024),
        ("1.5GiB", 3 << 29),
        ("2 GB", 2_000_000_000),
        ("1TiB", 1 << 40),
        ("64B", 64),
        ("1_000", 1000),
        ("-3", -3),
    ],
)
def test_integers_with_suffix(text: str, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1.0001k", "1iB", "1e3", "0x10", "1 k B", "one", "1KB1", "١k٢", "1" * 5000]
)
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError):
        parse_int(text)


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back(value: int) -> None:
    assert parse_int(str(value)) == value
    assert parse_int(f"{value}MiB") == value << 20


def test_yaml_takes_native_values_and_text(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "size: 1GiB\nratio: 1\neager: yes\nnames: [a, b]\nlimit: null\n")
    settings = load(["--config", config])
    assert settings == Example(size=1 << 30, ratio=1.0, eager=True, names=("a", "b"))


def test_flags_of_all_types() -> None:
    settings = load(
        ["--size=2k", "--ratio", "0", "--eager", "--names", "a", "--names", "b,", "--mode", "fast", "--limit", "5"]
    )
    assert settings == Example(size=2000, ratio=0.0, eager=True, names=("a", "b"), mode="fast", limit=5)
    assert load(["--no-eager"], {"HEADRACE_EAGER": "true"}).eager is False


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("YES", True), ("off", False), ("0", False)])
def test_words_for_booleans(text: str, value: bool) -> None:
    assert load(environ={"HEADRACE_EAGER": text}).eager is value


@pytest.mark.parametrize(
    ("argv", "environ", "key", "problem"),
    [
        (["--sise", "1"], {}, "--sise", "unknown flag; did you mean --size?"),
        (["--zzzz"], {}, "--zzzz", "unknown flag; see --help"),
        (["--siz", "1"], {}, "--siz", "unknown flag; did you mean --size?"),
        (["--bold"], {}, "--bold", "unknown flag; see --help"),
        (["word"], {}, "word", "unexpected argument"),
        (["--size"], {}, "--size", "expected one argument"),
        (["--size", "0"], {}, "--size", "must be int >= 1, not '0'"),
        (["--size", "ten"], {}, "--size", "must be int, not 'ten'"),
        (["--size", "1.5"], {}, "--size", "must be int, not '1.5'"),
        ([], {"HEADRACE_SIZE": "0"}, "HEADRACE_SIZE", "must be int >= 1, not '0'"),
        ([], {"HEADRACE_RATIO": "nan"}, "HEADRACE_RATIO", "must be float, not 'nan'"),
        ([], {"HEADRACE_RATIO": "2"}, "HEADRACE_RATIO", "must be float <= 1.0, not '2'"),
        ([], {"HEADRACE_EAGER": "maybe"}, "HEADRACE_EAGER", "must be true or false, not 'maybe'"),
        ([], {"HEADRACE_MODE": "medium"}, "HEADRACE_MODE", "must be one of slow, fast, not 'medium'"),
        (["--mode", "medium"], {}, "--mode", "must be one of slow, fast, not 'medium'"),
        (["--config", "/nowhere/x.yaml"], {}, "--config", "cannot read /nowhere/x.yaml: No such file or directory"),
        ([], {"HEADRACE_CONFIG": "/"}, "HEADRACE_CONFIG", "cannot read /: Is a directory"),
        ([], {"HEADRACE_SERVICE_ID": "a.b"}, "HEADRACE_SERVICE_ID", "must be str matching regex"),
        (["--eager=1"], {}, "--eager/--no-eager", "ignored explicit argument '1'"),
    ],
)
def test_mistakes_are_named_as_written(argv: list[str], environ: dict[str, str], key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(argv, environ)
    assert raised.value.key == key
    assert raised.value.problem.startswith(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sise: 1\n", "sise: unknown key in {path}; did you mean size?"),
        ("size: 0\n", "size (in {path}): must be int >= 1, not 0"),
        ("size: true\n", "size (in {path}): must be int, not True"),
        ("size: [1]\n", "size (in {path}): must be int, not [1]"),
        ("ratio: true\n", "ratio (in {path}): must be float, not True"),
        ("mode: 1\n", "mode (in {path}): must be one of slow, fast, not 1"),
        ("log_level: {a: 1}\n", "log_level (in {path}): must be one of debug, info, warning, error, not {{'a': 1}}"),
        ("- size\n", "--config: {path} holds no keys"),
        ("1: 2\n", "1: unknown key in {path}; see --help"),
        ("other: {size: 1}\n", "other: unknown key in {path}; see --help"),
    ],
)
def test_mistakes_in_yaml_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load(["--config", path])
    assert str(raised.value) == message.format(path=path)


@pytest.mark.parametrize(
    "text", ["a: [", "\t", "!!python/object/apply:os.system [true]", "a: b: c", "\x00", "[" * 5000]
)
def test_what_is_no_yaml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(["--config", yaml_file(tmp_path, text)])
    assert raised.value.key == "--config" and "\n" not in str(raised.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load(["--config", yaml_file(tmp_path, "# nothing\n")]) == Example()


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceeds"):
        load(["--config", yaml_file(tmp_path, "#" * 1_100_000)])


def test_sections_of_a_shared_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "size: 1\nworker:\n  size: 2\nrouter:\n  nothing: 3\n")
    assert load(["--config", path]).size == 1
    assert load(["--config", path + "#worker"]).size == 2
    assert load(["--config", path + "#scheduler"]).size == 10
    with pytest.raises(ConfigError, match=r"^router.nothing: unknown key in "):
        load(["--config", path + "#router"])


def test_secrets_come_from_files(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    assert load(["--nats-password-file", str(secret)]).nats_password == "hunter2"
    assert load(environ={"HEADRACE_NATS_PASSWORD_FILE": str(secret)}).nats_password == "hunter2"
    assert load(environ={"HEADRACE_NATS_PASSWORD": "direct"}).nats_password == "direct"
    config = yaml_file(tmp_path, f"nats_password_file: {secret}\n")
    assert load(["--config", config]).nats_password == "hunter2"


def test_secrets_are_neither_flags_nor_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(["--nats-password", "hunter2"])
    assert raised.value.key == "--nats-password" and "hunter2" not in str(raised.value)

    class Strict(Struct, frozen=True, kw_only=True):
        key: Annotated[Secret, Meta(min_length=20)] = ""
        """A key."""

    with pytest.raises(ConfigError) as raised:
        load_settings(Strict, [], {"HEADRACE_KEY": "hunter2"}, prog="x")
    assert raised.value.key == "HEADRACE_KEY" and "hunter2" not in str(raised.value)
    with pytest.raises(SystemExit):
        load_settings(Strict, ["--help"], {"HEADRACE_KEY": "hunter2"}, prog="x")
    assert "hunter2" not in capsys.readouterr().out


def test_a_secret_has_one_source(tmp_path: Path) -> None:
    environ = {"HEADRACE_NATS_PASSWORD": "a", "HEADRACE_NATS_PASSWORD_FILE": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^HEADRACE_NATS_PASSWORD_FILE: excludes HEADRACE_NATS_PASSWORD"):
        load(environ=environ)


def test_a_missing_secret_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^HEADRACE_NATS_PASSWORD_FILE: cannot read /nowhere: "):
        load(environ={"HEADRACE_NATS_PASSWORD_FILE": "/nowhere"})


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        load(["--help"])
    assert raised.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--size INT How large. Default: 10. [env HEADRACE_SIZE]" in text
    assert "--mode slow|fast Which way, 100 % sure. Default: slow. [env HEADRACE_MODE]" in text
    assert "--eager, --no-eager Whether now. Default: False. [env HEADRACE_EAGER]" in text
    assert "--nats-password-file FILE File that holds this: Password at the broker." in text
    for name in Example.__struct_fields__:
        assert f"HEADRACE_{name.upper()}" in text


@pytest.mark.parametrize("service", ["router", "scheduler", "worker", "autoscaler"])
def test_services_stop_with_one_line(service: str) -> None:
    command = [sys.executable, "-m", f"headrace_{service}", "--log-levle", "info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"headrace-{service}: --log-levle: unknown flag; did you mean --log-level?\n"
