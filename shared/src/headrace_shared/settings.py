"""Settings: flag > environment > YAML > default, read once into a frozen struct.

A settings class is a frozen msgspec Struct whose fields all have a default and a docstring. The field `nats_url` is the
flag `--nats-url`, the variable `HEADRACE_NATS_URL` and the YAML key `nats_url`. Limits are written as
`Annotated[int, Meta(ge=1)]`. An empty variable counts as unset. Integers may carry a suffix: 1k is 1000, 1KiB is 1024.

A field of type `Secret` has no flag of its own, since command lines are public, but each source also takes
`<field>_file`, the path of a file that holds the value.

The YAML file is named by `--config` or HEADRACE_CONFIG, as `path` or, for one mapping inside it, `path#section`. The
mappings `router`, `scheduler`, `worker` and `autoscaler` of a file are such sections and may stand beside the keys.
"""

import argparse
import ast
import difflib
import inspect
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from headrace_shared.errors import ConfigError

PREFIX = "HEADRACE_"
EXIT_CONFIG = 2
"""Exit code of a process that does not start because of its settings: restarting it is of no use."""
SEE_HELP = "see --help"
MAX_FILE_BYTES = 1024 * 1024
SECTIONS = ("router", "scheduler", "worker", "autoscaler")

_SERVICE_LINK = re.compile(r"(?:tcp|udp|sctp)://")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

Secret = Annotated[str, Meta(extra={"secret": True})]
"""A value that is neither shown nor taken from the command line."""


S = TypeVar("S", bound=Struct)


class _Field(NamedTuple):
    name: str
    type: Any
    default: Any
    help: str
    is_secret: bool
    is_bool: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


class _Given(NamedTuple):
    """A value and the key under which the user wrote it."""

    key: str
    value: Any


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(self.prog, message)


def load_settings(
    kind: type[S],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    elsewhere: str = SEE_HELP,
) -> S:
    """Reads the settings of class `kind`. Raises ConfigError naming the key as written; `--help` prints and exits.

    `elsewhere`: what to do about a flag that resembles none; in it `{variable}` is the variable of that name."""
    fields = _fields_of(kind)
    flags = _read_flags(fields, argv, prog, description, elsewhere)
    config = flags.pop("config", None) or _Given(PREFIX + "CONFIG", environ.get(PREFIX + "CONFIG", ""))
    sources = [flags, _read_environ(fields, environ), _read_yaml(fields, config)]
    values = {}
    for field in fields.values():
        given = next((found for source in sources if (found := _find(field, source)) is not None), None)
        if given is not None:
            values[field.name] = _parse(field, given)
    return kind(**values)


def load_settings_or_exit(kind: type[S], *, prog: str, description: str = "") -> S:
    """As `load_settings`, from the process's own arguments; a bad setting is one line on stderr and exit code 2."""
    try:
        return load_settings(kind, sys.argv[1:], os.environ, prog=prog, description=description)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(EXIT_CONFIG) from error


def parse_int(text: str) -> int:
    """An integer with an optional suffix: k, M, G, T (powers of 1000), KiB, MiB, GiB, TiB (of 1024), or B.

    Raises ValueError."""
    match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?) ?([kKMGT]?)(iB|B)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no integer")
    digits, prefix, unit = match.groups()
    if unit == "iB" and not prefix:
        raise ValueError(f"{text!r} is no integer")
    base = 1024 if unit == "iB" else 1000
    factor: int = base ** ["", "K", "M", "G", "T"].index(prefix.upper())
    whole, _, fraction = digits.replace("_", "").partition(".")
    numerator = int(whole + fraction) * factor
    divisor: int = 10 ** len(fraction)
    if numerator % divisor:
        raise ValueError(f"{text!r} is no integer")
    return numerator // divisor


def _fields_of(kind: type[Struct]) -> dict[str, _Field]:
    docs = _field_docs(kind)
    fields = {}
    for info in msgspec.structs.fields(kind):
        assert not info.required, f"{kind.__name__}.{info.name} has no default"
        assert info.name in docs, f"{kind.__name__}.{info.name} has no docstring"
        default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default
        is_secret = any(
            isinstance(meta, Meta) and (meta.extra or {}).get("secret")
            for meta in getattr(info.type, "__metadata__", ())
        )
        is_bool = _plain(info.type) is bool
        fields[info.name] = _Field(info.name, info.type, default, docs[info.name], is_secret, is_bool)
    return fields


def _field_docs(kind: type[Struct]) -> dict[str, str]:
    """The string below each field, of `kind` and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Struct) or base is Struct:
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _read_flags(
    fields: Mapping[str, _Field], argv: Sequence[str], prog: str, description: str, elsewhere: str
) -> dict[str, _Given]:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file, or FILE#SECTION. [env {PREFIX}CONFIG]")
    for field in fields.values():
        shown = "" if field.is_secret else f" Default: {_show(field.default)}."
        text = f"{field.help}{shown} [env {field.variable}]".replace("%", "%%")
        if field.is_secret:
            text = f"File that holds this: {field.help} [env {field.variable}_FILE or {field.variable}]"
            parser.add_argument(field.flag + "-file", metavar="FILE", help=text.replace("%", "%%"))
        elif field.is_bool:
            parser.add_argument(field.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif get_origin(_plain(field.type)) is tuple:
            parser.add_argument(field.flag, metavar="LIST", action="append", help=text)
        else:
            choices = _choices(field.type)
            metavar = "|".join(choices) if choices else _type_name(field.type).upper()
            parser.add_argument(field.flag, metavar=metavar, help=text)
    try:
        parsed, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(error.argument_name or prog, error.message) from error
    if unknown:
        key = unknown[0].partition("=")[0]
        known = ["--config", *(field.flag + "-file" * field.is_secret for field in fields.values())]
        if not key.startswith("-"):
            _, _, name = prog.partition(" ")[2].partition(" ")  # as in `headrace explain REQUEST`
            misplaced = f"; {name} comes before the flags" if name and argv[0].startswith("-") else ""
            raise ConfigError(key, f"unexpected argument{misplaced}")
        elsewhere = elsewhere.format(variable=PREFIX + key.strip("-").replace("-", "_").upper())
        raise ConfigError(key, "unknown flag" + _suggestion(key, known, elsewhere))
    return {
        name: _Given("--" + name.replace("_", "-"), ",".join(value) if isinstance(value, list) else value)
        for name, value in vars(parsed).items()
        if value is not None
    }


def _read_environ(fields: Mapping[str, _Field], environ: Mapping[str, str]) -> dict[str, _Given]:
    names = [*fields, *(name + "_file" for name, field in fields.items() if field.is_secret)]
    given = {name: _Given(PREFIX + name.upper(), environ.get(PREFIX + name.upper(), "")) for name in names}
    return {name: found for name, found in given.items() if found.value != "" and not _is_service_link(name, found)}


def _is_service_link(name: str, given: _Given) -> bool:
    """Kubernetes sets HEADRACE_PORT, in every container, where a Service is called headrace: no setting of ours."""
    return name.endswith("port") and _SERVICE_LINK.match(given.value) is not None


def _read_yaml(fields: Mapping[str, _Field], config: _Given) -> dict[str, _Given]:
    if config.value == "":
        return {}
    path, _, section = str(config.value).partition("#")
    text = _read_file(path, config.key)
    import yaml  # only now: most processes have no such file

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(config.key, f"{path} is no YAML: {' '.join(str(error).split())}") from error
    prefix = ""
    if section and isinstance(content, dict):
        content, prefix = content.get(section), section + "."
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(config.key, f"{path} holds no keys")
    given = {}
    for name, value in content.items():
        file_of = str(name).removesuffix("_file")
        if name not in fields and not (file_of != name and file_of in fields and fields[file_of].is_secret):
            if not prefix and name in SECTIONS and isinstance(value, dict):
                continue
            raise ConfigError(f"{prefix}{name}", f"unknown key in {path}" + _suggestion(str(name), list(fields)))
        if value is not None:
            given[str(name)] = _Given(f"{prefix}{name} (in {path})", value)
    return given


def _find(field: _Field, source: Mapping[str, _Given]) -> _Given | None:
    given = source.get(field.name)
    if not field.is_secret:
        return given
    from_file = source.get(field.name + "_file")
    if from_file is None:
        return given
    if given is not None:
        raise ConfigError(from_file.key, f"excludes {given.key}: set only one of them")
    return _Given(from_file.key, _read_file(str(from_file.value), from_file.key).rstrip("\r\n"))


def _read_file(path: str, key: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(key, f"cannot read {path}: {reason}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(key, f"{path} exceeds {MAX_FILE_BYTES} bytes")
    return text


def _parse(field: _Field, given: _Given) -> Any:
    """Text becomes the field's type; then type and limits are checked."""
    plain = _plain(field.type)
    value = given.value
    shown = "" if field.is_secret else f", not {value!r}"
    try:
        if isinstance(value, str):
            if plain is int or (get_origin(plain) is Literal and isinstance(get_args(plain)[0], int)):
                value = parse_int(value)
            elif plain is bool:
                value = _BOOLEANS[value.lower()]
            elif get_origin(plain) is tuple:
                value = [part.strip() for part in value.split(",") if part.strip()]
        if plain is float and not isinstance(value, bool):
            value = float(value)
            if not math.isfinite(value):
                raise ValueError(value)
        return msgspec.convert(value, type=field.type)
    except (ValueError, TypeError, KeyError) as error:
        choices = _choices(field.type)
        if choices:
            wanted = "must be one of " + ", ".join(choices)
        elif isinstance(error, msgspec.ValidationError):
            wanted = "must be " + str(error).removeprefix("Expected ").partition(", got")[0].replace("`", "")
        else:
            wanted = f"must be {_type_name(field.type)}"
        raise ConfigError(given.key, wanted + shown) from error


def _plain(kind: Any) -> Any:
    """The type without limits and without None."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return _plain(options[0]) if len(options) == 1 else kind
    return kind


def _choices(kind: Any) -> list[str]:
    plain = _plain(kind)
    return [str(option) for option in get_args(plain)] if get_origin(plain) is Literal else []


def _type_name(kind: Any) -> str:
    plain = _plain(kind)
    return {str: "text", bool: "true or false"}.get(plain, getattr(plain, "__name__", "list"))


def _show(default: Any) -> str:
    if default is None or default == "" or default == ():
        return "none"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _suggestion(name: str, known: Sequence[str], elsewhere: str = SEE_HELP) -> str:
    # Without the dashes, which would make all short flags alike.
    words = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-"), words, n=1, cutoff=0.7)
    return f"; did you mean {words[close[0]]}?" if close else f"; {elsewhere}"
