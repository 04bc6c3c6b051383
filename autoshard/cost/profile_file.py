"""A hardware profile as the file that `hardware.load_hardware` reads, in JSON or TOML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.cost.hardware import Hardware
from autoshard.errors import OptionsError
from autoshard.files import write_whole

SUFFIXES = (".json", ".toml")


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a profile; the file is as it was, or missing, until the new one is whole.

    Raises:
        OptionsError: the name ends in neither .json nor .toml, or the file cannot be written.
    """
    checked_suffix(path)
    try:
        write_whole(path, encoded(hardware, Path(path).suffix))
    except OSError as error:
        raise OptionsError(
            "The profile cannot be written.", f"{path}: {error}", "Give another --output."
        ) from error


def checked_suffix(path: str | Path) -> None:
    """Refuse a name that `load_hardware` would not read.

    Raises:
        OptionsError: it ends in neither .json nor .toml.
    """
    if Path(path).suffix not in SUFFIXES:
        raise OptionsError(
            "A profile is a .json or a .toml file.", str(path), f"Write {path}.json, say."
        )


def encoded(hardware: Hardware, suffix: str) -> bytes:
    """The content of a file with that suffix."""
    data = hardware.to_dict()
    if suffix == ".json":
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_toml(key, value)}" for key, value in data.items() if key not in tables]
    for name, table in tables.items():
        rows = [f"{key} = {_toml(key, value)}" for key, value in table.items()]
        lines += ["", f"[{name}]", *rows] if rows else []
    return ("\n".join(lines) + "\n").encode()


def _toml(key: str, value: Any) -> str:
    """A value; JSON's texts and numbers are TOML's but for what is infinite."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{name} = {_toml(name, item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if key == "source":
        text = json.dumps(value, ensure_ascii=False)[1:-1]
        return (
            f'"""\n{textwrap.fill(text, 108, break_long_words=False, break_on_hyphens=False)}\n"""'
        )
    if isinstance(value, float) and value == float("inf"):
        return "inf"
    return json.dumps(value, ensure_ascii=False)
