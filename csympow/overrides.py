"""Config files, and overrides of their fields from the command line: `--config.model.power=4`.

A value is read by the type that the schema gives its field; a name the schema does not know is refused with the nearest
one it does.
"""

import dataclasses
import difflib
import importlib.util
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from csympow.config import Config, ConfigError


@typing.overload
def load(path: str, overrides: Mapping[str, str] | None = None) -> Config: ...
@typing.overload
def load[C](path: str, overrides: Mapping[str, str] | None = None, *, schema: type[C]) -> C: ...
def load(path: str, overrides: Mapping[str, str] | None = None, *, schema: type = Config) -> Any:
  """The config that the file's `get_config()` returns, of a schema, with fields replaced by dotted name."""
  file = Path(path)
  if not file.is_file():
    if file.is_dir():
      raise ConfigError(f"--config must be a Python file with get_config(), and {path} is a directory")
    near = difflib.get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=1)
    hint = f"; did you mean {file.parent / near[0]}?" if near else ""
    raise ConfigError(f"--config must be a Python file with get_config(), and there is no {path}{hint}")
  config = _run(file, schema)
  return replaced(config, overrides or {})


def replaced[C](config: C, overrides: Mapping[str, str]) -> C:
  """The config with fields replaced, all at once: only the result need make sense."""
  tree: dict[str, Any] = {}
  for name, text in overrides.items():
    *parents, leaf = _known_path(type(config), name)
    branch = tree
    for parent in parents:
      branch = branch.setdefault(parent, {})
    branch[leaf] = text
  result: C = _rebuilt(config, tree, "")
  return result


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  """Takes `--config.NAME=VALUE` and `--config.NAME VALUE` out of a command line; returns the rest and these."""
  rest: list[str] = []
  overrides: dict[str, str] = {}
  queue = list(arguments)
  while queue:
    argument = queue.pop(0)
    if not argument.startswith("--config."):
      rest.append(argument)
      continue
    name, given, value = argument.removeprefix("--config.").partition("=")
    if not given:
      if not queue or queue[0].startswith("--"):
        raise ConfigError(f"--config.{name} needs a value: --config.{name}=VALUE")
      value = queue.pop(0)
    overrides[name] = value
  return rest, overrides


def _run(file: Path, schema: type) -> Any:
  spec = importlib.util.spec_from_file_location("csympow_config_file", file)
  if spec is None or spec.loader is None:
    raise ConfigError(f"--config must be a Python file, got {file}")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    make = getattr(module, "get_config", None)
    config = make() if make else None
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:  # whatever a user's file raises is the user's to read
    raise ConfigError(f"{file}: {type(error).__name__}: {' '.join(str(error).split())}") from error
  if make is None:
    raise ConfigError(f"--config must be a Python file with get_config(), and {file} has no get_config()")
  if not isinstance(config, schema):
    wanted = f"{schema.__module__}.{schema.__name__}"
    raise ConfigError(f"{file}: get_config() must return a {wanted}, got {type(config).__name__}")
  return config


def _known_path(schema: type, name: str) -> list[str]:
  """The parts of a dotted name, after a look whether the schema has each."""
  parts = name.split(".")
  for i, part in enumerate(parts):
    hints = typing.get_type_hints(schema)
    if part not in hints:
      place = "".join(f"{parent}." for parent in parts[:i])
      near = difflib.get_close_matches(part, hints, n=1, cutoff=0.5)
      elsewhere = [known for known in _names(Config) if known.split(".")[-1] == part]
      hint = f"did you mean --config.{place}{near[0]}?" if near else f"it has {', '.join(hints)}"
      hint = f"did you mean --config.{elsewhere[0]}?" if elsewhere else hint
      raise ConfigError(
        f"--config.{name}: no field {part!r} in the config{' at ' + place[:-1] if place else ''}; {hint}"
      )
    inner = hints[part]
    if i + 1 < len(parts):
      if not dataclasses.is_dataclass(inner):
        raise ConfigError(f"--config.{name}: {'.'.join(parts[: i + 1])} is a value and has no fields")
      schema = typing.cast(type, inner)
    elif dataclasses.is_dataclass(inner):
      fields = ", ".join(field.name for field in dataclasses.fields(inner))
      raise ConfigError(f"--config.{name} has fields of its own; set one of {fields}")
  return parts


def _names(schema: type, prefix: str = "") -> list[str]:
  names = []
  for name, hint in typing.get_type_hints(schema).items():
    names += _names(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]  # type: ignore[arg-type]
  return names


def _rebuilt(config: Any, tree: Mapping[str, Any], prefix: str) -> Any:
  hints = typing.get_type_hints(type(config))
  changes = {
    name: _rebuilt(getattr(config, name), value, f"{prefix}{name}.")
    if isinstance(value, dict)
    else _parsed(hints[name], value, prefix + name)
    for name, value in tree.items()
  }
  try:
    return dataclasses.replace(config, **changes)
  except ConfigError:
    raise
  except ValueError as error:  # ModelConfig's own checks
    raise ConfigError(f"{prefix}{error}") from error


def _parsed(hint: Any, text: str, name: str) -> Any:
  """The text as a value of the annotated type."""
  options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
  if type(None) in options and text.lower() == "none":
    return None
  for option in options:
    if option is type(None):
      continue
    if typing.get_origin(option) is typing.Literal:
      if text in typing.get_args(option):
        return text
      wanted = "one of " + ", ".join(typing.get_args(option))
    else:
      wanted = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[option]
      value = _READERS[option](text)
      if value is not None:
        return value
  wanted += " or none" if type(None) in options else ""
  raise ConfigError(f"--config.{name} must be {wanted}, got {text!r}")


def _integer(text: str) -> int | None:
  """Also 1e6 and 65_536."""
  try:
    return int(text)
  except ValueError:
    value = _number(text)
    return int(value) if value is not None and math.isfinite(value) and value == int(value) else None


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def _truth(text: str) -> bool | None:
  return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())


_READERS: dict[Any, Any] = {int: _integer, float: _number, bool: _truth, str: str}
