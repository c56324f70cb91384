"""Reads a record of common/config: flags, else environment, else a YAML file, else defaults.

    --engine.cache.page-size 32
    BATON_ENGINE__CACHE__PAGE_SIZE=32
    engine: {cache: {page_size: 32}}

Flags, their help and their validation come from the record's fields. Only short flags are listed
here.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from common.config import DecodeConfig, EncodeConfig, PrefillConfig, RankHostConfig, RouterConfig
from common.config.renamed import RENAMED_FLAGS, renamed
from common.process.standard_output import say

EXIT_USAGE = 2
_MAX_FILE_BYTES = 1 << 20
_BYTES_OF_A_VALUE = 64
_MAX_SHOWN = 300  # characters of an invalid value
ENV_PREFIX = "BATON_"
_LISTED = 32  # choices listed in an error
_NEAR = 0.85  # similarity for difflib: one letter in seven may differ
_BETWEEN = "__"
_PROGRAMS = (RouterConfig, PrefillConfig, DecodeConfig, EncodeConfig, RankHostConfig)
SHORT_NAMES = {
    "engine.model": "model",
    "engine.device": "device",
    "engine.dtype": "dtype",
    "engine.quantize": "quantize",
    "engine.model-backend": "model-backend",
    "server.host": "host",
    "server.port": "port",
    "server.metrics-port": "metrics-port",
    "server.log-level": "log-level",
    "server.log-format": "log-format",
    "server.tls.cert": "tls-cert",
    "server.tls.key": "tls-key",
    "server.tls.ca": "tls-ca",
    "server.secret-file": "secret-file",
    "server.insecure": "insecure",
    "clients.api-keys": "api-keys",
    "clients.isolate-cache-by-key": "isolate-cache-by-key",
    "clients.allowed-hosts": "allowed-hosts",
    "clients.cors-origins": "cors-origins",
}
# Flags that --help shows. --help-all shows all of them.
COMMON_FLAGS = frozenset(
    f"--{name}"
    for name in (
        *SHORT_NAMES.values(),
        *("config", "http-port", "served-model-name", "prefill", "decode", "policy", "processes"),
        *("max-concurrent-requests", "mode", "leader", "engine.context-length"),
        *("engine.cache.num-pages", "engine.cache.memory-fraction"),
        *("engine.scheduler.max-running-requests", "transfer.listen-host"),
    )
)

R = TypeVar("R", bound=BaseModel)


def read(record: type[R], program: str, arguments: Sequence[str], *, about: str = "") -> R:
    """Return the record from `arguments`, the environment and the file named by --config.

    If a value is invalid or missing, print one line and exit with code 2. The line names the flag,
    the variable or the entry of the file. For --help, print the flags and exit with 0.

    Args:
        program: name in messages, as the user called it.
        about: sentences that --help begins with.
    """
    return resolve(record, program, arguments, about=about)[0]


def resolve(
    record: type[R], program: str, arguments: Sequence[str], *, about: str = ""
) -> tuple[R, "SettingSources"]:
    """Return the record as `read` does, and the source of each value."""
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    file_parser.add_argument("--config", type=Path)
    try:
        known, flags = file_parser.parse_known_args(arguments)
        given = {} if known.config is None else _content(known.config)
        named = SettingSources(flags, known.config, given)
        for sentence in _wrong_variables():
            raise SettingsError(sentence)
        values = _settings_class(record, program, about, flags, given)()
        config = record.model_validate(values.model_dump(exclude_unset=True))
        config.model_dump_json()  # as sent to other processes: ValueError for a lone surrogate
        return config, named
    except ValidationError as error:
        wrong(program, "; ".join(_sentence(detail, named) for detail in error.errors()))
    except (argparse.ArgumentError, SettingsError, ValueError) as error:
        wrong(program, str(error))


def parser_of(record: type[BaseModel], program: str) -> "ConfigArgumentParser":
    """Return the parser of a process that reads this record."""
    source = _flags_source(_settings_class(record, program, "", [], {}), program, "", [])
    return cast(ConfigArgumentParser, source.root_parser)


def wrong(program: str, message: str) -> NoReturn:
    """Print one line about an invalid value, and exit with code 2."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def _settings_class(
    record: type[BaseModel], program: str, about: str, flags: list[str], given: dict[str, Any]
) -> type[BaseSettings]:
    class Settings(BaseSettings, record):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX,
            env_nested_delimiter=_BETWEEN,
            nested_model_default_partial_update=True,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                _flags_source(settings_cls, program, about, flags),
                _Environment(settings_cls),
                InitSettingsSource(settings_cls, given),
                InitSettingsSource(settings_cls, _empty_parts(record)),
            )

    return Settings


def _content(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise SettingsError(f"--config: {file} is longer than {_MAX_FILE_BYTES} bytes")
        content = yaml.safe_load(text)
    except RecursionError as error:
        raise SettingsError(f"--config: {file} is nested too deeply") from error
    except OSError as error:
        raise SettingsError(f"--config: {file}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--config: {file}: {error}") from error
    # Errors that PyYAML raises for values that do not match an explicit tag, such as !!int "".
    except (LookupError, AttributeError) as error:
        raise SettingsError(f"--config: {file}: a value does not match its YAML tag") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"--config: {file} is not a mapping of settings to values")
    if _size(content) > _MAX_FILE_BYTES:
        raise SettingsError(f"--config: {file} is too large once its aliases are written out")
    for name in content or {}:
        if not isinstance(name, str):
            raise SettingsError(f"--config: {file}: {name!r} is not the name of a setting")
    return content or {}


def _size(content: Any) -> int:
    """Return the approximate size of a YAML value written out, or more than _MAX_FILE_BYTES."""
    size, left = 0, [content]
    while left and size <= _MAX_FILE_BYTES:
        match left.pop():
            case dict() as mapping:
                left += [*mapping, *mapping.values()]
            case list() | tuple() | set() as values:
                left += values
            case str() | bytes() as text:
                size += len(text)
        size += _BYTES_OF_A_VALUE
    return size


def _flags_source(
    settings_class: type[BaseSettings], program: str, about: str, flags: list[str]
) -> CliSettingsSource[argparse.ArgumentParser]:
    parser = ConfigArgumentParser(
        prog=program,
        usage="%(prog)s [--config FILE] [--FLAG VALUE]...",
        description=f"{about} Every flag can also be set by an environment variable "
        f"({ENV_PREFIX}SERVER__HOST=0.0.0.0) or in the YAML file of --config "
        "(server: {host: 0.0.0.0}). Flags override variables, and variables override the file.",
        formatter_class=_Help,
        common=COMMON_FLAGS,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with settings (none)"
    )
    return _Flags(
        settings_class,
        root_parser=parser,
        cli_parse_args=flags,
        cli_parse_none_str="null",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_shortcuts=SHORT_NAMES,
    )


class ConfigArgumentParser(argparse.ArgumentParser):
    """An argument parser without abbreviations that reports errors by `wrong`.

    `--help` shows the common arguments, and `--help-all` shows all of them.
    """

    def __init__(self, *, common: Collection[str] = (), **options: Any) -> None:
        """
        Args:
            common: flags that `--help` shows. Empty: all except those of advanced groups.
        """
        self.common = set(common)
        self._advanced: list[argparse._ArgumentGroup] = []
        super().__init__(**{"allow_abbrev": False, **options})
        if self.add_help:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
        self._given: Sequence[str] = ()

    def add_advanced_group(self, title: str, description: str) -> argparse._ArgumentGroup:
        """Add a group of arguments that `--help` leaves out."""
        group = self.add_argument_group(title, description)
        self._advanced.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    @property
    def flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        self._refuse(message, self.flags)

    def reject_unknown_flags(self, left: Sequence[str], *records: type[BaseModel]) -> None:
        """End this process if a remaining flag belongs to none of these records.

        Args:
            left: arguments that `parse_known_args` did not use.
            records: records of other commands that read the flags.
        """
        theirs = [flag for record in records for flag in parser_of(record, "").flags]
        unknown = [flag for flag in map(_flag, left) if flag and flag not in theirs]
        if unknown or (left and not records):
            what = f"unrecognized arguments: {' '.join(unknown or left)}"
            self._refuse(what, [*self.flags, *theirs])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        listed = f"{choices[0]} to {choices[-1]}" if len(choices) > _LISTED else ", ".join(choices)
        near = difflib.get_close_matches(str(value), choices, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise argparse.ArgumentError(action, f"{value!r} is invalid: {meant}expected {listed}")

    def _refuse(self, message: str, flags: Collection[str]) -> NoReturn:
        """Report an error, with the known flag most similar to the first unknown one, if any."""
        if split := self._split_list():
            wrong(self.prog, f"{message} (separate several values by commas: {split})")
        unknown = next((flag for flag in map(_flag, self._given) if flag and flag not in flags), "")
        if (new := _renamed_flag(unknown)) in flags:
            wrong(self.prog, f"`{unknown}` was renamed: use `{new}`")
        near = difflib.get_close_matches(unknown, flags, 1, _NEAR)
        meant = f"did you mean {near[0]}? " if near else ""
        wrong(self.prog, f"{message} ({meant}--help-all lists all options)")

    def _split_list(self) -> str:
        """Return the correct form of a list whose values were separated by spaces, or ""."""
        for number, word in enumerate(self._given):
            name, has_value, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None or not str(action.metavar).startswith("tuple["):
                continue
            values = [value] if has_value else []
            following = takewhile(lambda each: not each.startswith("-"), self._given[number + 1 :])
            values += following
            if len(values) > 1:
                return f"{name} {','.join(each.strip(',') for each in values)}"
        return ""

    def print_help(self, file: Any = None) -> None:
        say(self.format_help())

    def format_help(self) -> str:
        return self.help_text(everything=False)

    def help_text(self, *, everything: bool) -> str:
        formatter = self._get_formatter()
        groups = [(group, self._shown(group, everything)) for group in self._action_groups]
        shown = [action for _, actions in groups for action in actions]
        exclusive = [
            group
            for group in self._mutually_exclusive_groups
            if all(action in shown for action in group._group_actions)
        ]
        used = [action for action in shown if not isinstance(action, _HelpAll)]
        formatter.add_usage(self.usage, used, exclusive)
        formatter.add_text(self.description)
        for group, actions in groups:
            if actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        if hidden := sum(action.help != argparse.SUPPRESS for action in self._actions) - len(shown):
            formatter.add_text(f"--help-all shows {hidden} more options.")
        return formatter.format_help()

    def _shown(self, group: argparse._ArgumentGroup, everything: bool) -> Sequence[argparse.Action]:
        given = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if everything:
            return given
        if group in self._advanced:
            return ()
        return [
            action
            for action in given
            if not self.common
            or isinstance(action, (argparse._HelpAction, _HelpAll))
            or any(flag in self.common for flag in action.option_strings)
        ]


# Flag, type, default, name of the value, and help.
Option = tuple[str, Callable[[str], Any], Any, str | None, str]


def add_options(to: argparse._ActionsContainer, *options: Option) -> None:
    for flag, kind, default, metavar, text in options:
        to.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


class _HelpAll(argparse.Action):
    """A flag that prints the help of all arguments and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, ConfigArgumentParser)
        say(parser.help_text(everything=True))
        parser.exit()


def _flag(word: str) -> str:
    """Return the flag without its value, or "" if the word is not a flag."""
    return word.partition("=")[0] if word.startswith("--") else ""


def _renamed_flag(flag: str) -> str:
    """Return the new name of a renamed flag, or "".

    Args:
        flag: flag with the whole path of a setting, or a short flag.
    """
    found = re.fullmatch(r"--(no-)?(.+)", flag)
    if found is None:
        return ""
    path = found[2].replace("-", "_")
    new = RENAMED_FLAGS.get(path) or renamed(path)
    return f"--{found[1] or ''}{new.replace('_', '-')}" if new else ""


class _Help(argparse.HelpFormatter):
    """A help formatter that omits empty defaults: descriptions say what an unset value means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and re.sub(r" \(default: (null|None|\(\))\)", "", action.help)

    def add_argument(self, action: argparse.Action) -> None:
        if isinstance(action.metavar, str):  # str,... instead of Python's notation of a tuple
            action.metavar = re.sub(r"^tuple\[(.+)\]$", r"\1", action.metavar)
        super().add_argument(action)


# An IPv6 address with its port, in a list a,b. It is no JSON, although it begins like an array.
_IPV6_ADDRESS = re.compile(r'(?:^|(?<=,))\[[^][",]+\]:[0-9]+(?=,|$)')


class _Flags(CliSettingsSource[argparse.ArgumentParser]):
    """A source of flags that accepts IPv6 addresses in lists."""

    def _merge_parsed_list(self, parsed_list: list[str], field_name: str) -> str:
        quoted = [
            _IPV6_ADDRESS.sub(r'"\g<0>"', each) if isinstance(each, str) else each
            for each in parsed_list
        ]
        return super()._merge_parsed_list(quoted, field_name)


class _Environment(EnvSettingsSource):
    """An environment source that accepts lists as a,b, as flags do, in addition to JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        is_json = str(value).startswith("[") and not _IPV6_ADDRESS.match(value)
        if get_origin(field.annotation) is tuple and not is_json:
            return str(value).split(",")
        return super().decode_complex_value(field_name, field, value)


def _empty_parts(record: type[BaseModel]) -> dict[str, Any]:
    """Return required parts as empty, so that errors name the missing flags in them."""
    required = {
        name: field.annotation for name, field in record.model_fields.items() if field.is_required()
    }
    return {
        name: {}
        for name, kind in required.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


class SettingSources:
    """Names settings as the user gave them, and finds the sources of their values."""

    def __init__(self, flags: Sequence[str], file: Path | None, given: Mapping[str, Any]) -> None:
        """
        Args:
            given: content of that file.
        """
        self._flags = {flag.partition("=")[0] for flag in flags}
        self._file = file
        self._given = given

    def __call__(self, where: Sequence[str]) -> str:
        """Return the name of a setting.

        Args:
            where: the fields from the record down to the setting, such as ("engine", "model").
        """
        return next(self._given_as(where), f"--{_flag_names(where)[0]}")

    def of(self, where: Sequence[str]) -> str:
        """Return the source of a value: its flag, variable, place in the file, or "default"."""
        return next(self._given_as(where), "default")

    def _given_as(self, where: Sequence[str]) -> Iterator[str]:
        """Yield the places that set a setting, the one with precedence first."""
        for name in _flag_names(where):
            negative = f"--no-{name}"
            if self._flags.intersection((f"--{name}", negative)):
                yield f"--{name}"
        if variable := _variable(where):
            yield variable
        if self._file is not None and _says(self._given, where):
            yield f"{self._file}: {'.'.join(where)}"


def _flag_names(where: Sequence[str]) -> list[str]:
    """Return the flags of a setting, the short one first if there is one."""
    long = ".".join(where).replace("_", "-")
    return [*([SHORT_NAMES[long]] if long in SHORT_NAMES else []), long]


def _variable(where: Sequence[str]) -> str | None:
    """Return the variable that sets the setting, or that sets a part around it as JSON, or None."""
    for depth in range(len(where), 0, -1):
        name = f"{ENV_PREFIX}{_BETWEEN.join(where[:depth])}".upper()
        for variable in os.environ:
            if variable.upper() == name:
                return variable
    return None


def _wrong_variables() -> Iterator[str]:
    """Yield an error sentence for each variable with Baton's prefix that names a renamed setting,
    or no part of any configuration.

    Variables of other processes are accepted, because processes may share an environment. So are
    variables without a part: Kubernetes sets some for a service called baton.
    """
    parts = {name for record in _PROGRAMS for name in record.model_fields}
    for variable in sorted(os.environ):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        path = variable[len(ENV_PREFIX) :].lower().replace(_BETWEEN, ".")
        if new := renamed(path):
            new_variable = ENV_PREFIX + new.replace(".", _BETWEEN).upper()
            yield f"`{variable}` was renamed: use `{new_variable}`"
        elif "." in path and path.partition(".")[0] not in parts:
            yield f"{variable}: no component has this setting"


def _says(given: Any, where: Sequence[str]) -> bool:
    for part in where:
        entries = {str(key): value for key, value in given.items()} if type(given) is dict else {}
        if part not in entries:
            return False
        given = entries[part]
    return True


def _sentence(detail: ErrorDetails, named: SettingSources) -> str:
    """Return the message for one invalid value.

    For example `--engine.cache.page-size: must be a power of two, got 3`.
    """
    where = [str(part) for part in detail["loc"]]
    if detail["type"] == "missing":
        return f"--{_flag_names(where)[0]} is required"
    setting = named(where)
    if detail["type"] == "extra_forbidden":
        new = renamed(".".join(where))
        return (
            f"`{setting}` was renamed: use `{new}`"
            if new
            else f"{setting}: there is no such setting"
        )
    message = detail["msg"].removeprefix("Value error, ")
    sentence = f"{message[:1].lower()}{message[1:]}"
    if where:  # otherwise the error concerns several settings, and names them
        sentence = f"{setting}: {sentence}"
    if isinstance(detail["input"], dict):
        return sentence
    given = repr(detail["input"])
    cut = given if len(given) <= _MAX_SHOWN else f"{given[:_MAX_SHOWN]}..."
    return f"{sentence}, got {cut}"
