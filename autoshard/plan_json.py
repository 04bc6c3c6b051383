"""A plan as JSON: `autoshard/schema/plan.schema.json` is its schema, docs/plan-format.md its manual.

The dataclasses of `plan_types` are the format: an object has exactly their fields, except those
that are no part of a plan's value (`compare=False`). Layouts are written as placements ("S(0)"), the
mesh as a list of axes. Equal plans have equal bytes: objects in the fields' order, mappings sorted,
floats by `repr`, and one line for whatever fits on one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from autoshard.errors import AutoshardError, PlanError
from autoshard.files import write_whole
from autoshard.mesh import Mesh, MeshAxis
from autoshard.placement import Invariant, Placement, Shard, parse_placement
from autoshard.plan_profile import changed_profile
from autoshard.plan_types import SCHEMA_VERSION, Part, Plan

log = logging.getLogger("autoshard")
SCHEMA = "autoshard.plan"
LINE = 100
_REMAKE = "Make the plan again: `autoshard plan SOURCE --json plan.json`."
_CHOICES = {"mode": ("train", "infer"), "search": ("tensor", "all")}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(plan: Plan) -> str:
    """`plan` as JSON text that ends with a newline. Equal plans give equal text."""
    document = {"schema": SCHEMA, "version": SCHEMA_VERSION, **_encode_object(plan)}
    return _layout(document, 0) + "\n"


def encoded(plan: Plan) -> bytes:
    """`to_json` as UTF-8; what UTF-8 has no bytes for (a lone surrogate) is escaped, as in JSON."""
    return to_json(plan).encode("utf-8", "backslashreplace")


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote.

    Raises:
        PlanError: the text is damaged, is no plan, has an unknown version, or a field is missing,
            unknown or of the wrong type; `where` is the field's JSON path.
    """
    document = _parse(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise PlanError(
            "The text is JSON, but not an autoshard plan.",
            fix=f'A plan\'s JSON begins with {{"schema": "{SCHEMA}". {_REMAKE}',
        )
    version = document.get("version")
    if type(version) is not int or version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise PlanError(
            f"The plan has version {json.dumps(version)}; this autoshard reads {SCHEMA_VERSION}.",
            where="version",
            fix="Upgrade autoshard." if newer else _REMAKE,
        )
    fields = {key: value for key, value in document.items() if key not in ("schema", "version")}
    plan = _decode_object(fields, Plan, "")
    _check(plan)
    return plan


def save(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path`; an existing file is replaced whole or not at all.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        write_whole(path, encoded(plan))
    except OSError as error:
        raise PlanError(
            f"The plan cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="Name a file in a folder that exists and may be written to.",
        ) from None


def load(path: str | Path) -> Plan:
    """The plan saved at `path`; a warning is logged where its costs are from an older profile.

    Raises:
        PlanError: there is no such file, or what `from_json` raises, with the file named.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise PlanError("There is no such file.", where=str(path)) from None
    except IsADirectoryError:
        raise PlanError(
            "A folder is no plan.", where=str(path), fix="Name the plan's file in it."
        ) from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"The file is not text: byte {error.start} is not UTF-8.", where=str(path), fix=_REMAKE
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"The file cannot be read: {reason}.", where=str(path)) from None
    try:
        found = from_json(text)
    except PlanError as error:
        where = f"{path}, at {error.where}" if error.where else str(path)
        raise PlanError(error.what, where, error.fix) from None
    if told := changed_profile(found):
        log.warning("%s: %s", path, told)
    return found


# ---- text -----------------------------------------------------------------------------------


def _layout(value: object, indent: int) -> str:
    """`value` as JSON: on one line where that fits, else a member a line, and a record a line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + indent <= LINE or not isinstance(value, dict | list):
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, list):
        lines = [inner + json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{' ' * indent}]"
    lines = [f"{inner}{json.dumps(k)}: {_layout(item, indent + 1)}" for k, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{' ' * indent}}}"


def _parse(text: str) -> object:
    """The JSON document in `text`.

    Raises:
        PlanError: it is not JSON; where it is cut short, the last line is named.
    """
    if not text.strip():
        raise PlanError("The plan is empty.", fix=_REMAKE)
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        body = text.rstrip()
        if body.startswith("{") and (error.pos >= len(body) or not body.endswith("}")):
            line = body.count("\n") + 1
            raise PlanError(
                f"The plan is cut short: it ends in the middle of line {line}.", fix=_REMAKE
            ) from None
        raise PlanError(
            f"The text is not JSON: {error.msg}.",
            where=f"line {error.lineno}, column {error.colno}",
            fix=_REMAKE,
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The text is not JSON: {error}.", fix=_REMAKE) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"a field '{twice}' is there twice")
    return found


# ---- values: encode and decode by the dataclasses' annotations --------------------------------


@functools.cache
def _fields(kind: type) -> Mapping[str, Any]:
    """The fields of the dataclass `kind` that are written, with their types, in order."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.compare}


def _encode_object(value: object) -> dict[str, object]:
    return {
        name: _encode(getattr(value, name), hint) for name, hint in _fields(type(value)).items()
    }


def _encode(value: Any, hint: Any) -> object:
    """`value`, which has the type `hint`, as what JSON knows."""
    if value is None:
        return None
    if hint is Mesh:
        return [{"name": axis.name, "size": axis.size} for axis in value.axes]
    if hint == Placement or hint is Part:
        return str(value)
    if dataclasses.is_dataclass(hint):
        return _encode_object(value)
    arguments = typing.get_args(hint)
    if isinstance(value, tuple):
        return [_encode(item, arguments[0]) for item in value]
    if isinstance(value, dict):
        return {key: _encode(value[key], arguments[1]) for key in sorted(value)}
    if hint is float:
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return int(value) if hint is int else value


def _decode_object(value: object, kind: type, path: str) -> Any:
    """The `kind` whose fields are the members of `value`."""
    if not isinstance(value, dict):
        raise _mistyped(value, "an object", path)
    hints = _fields(kind)
    for name in value:
        if name not in hints:
            raise PlanError(
                f"The plan has an unknown field '{name}'.", where=_join(path, name), fix=_REMAKE
            )
    for name in hints:
        if name not in value:
            raise PlanError(
                f"The plan has no field '{name}'.", where=_join(path, name), fix=_REMAKE
            )
    return kind(**{n: _decode(value[n], hint, _join(path, n)) for n, hint in hints.items()})


def _decode(value: object, hint: Any, path: str) -> Any:
    """`value`, found at the JSON path `path`, as the type `hint`."""
    if isinstance(hint, types.UnionType) and hint != Placement:
        inner = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return None if value is None else _decode(value, inner, path)
    if hint is Mesh or hint is Part or hint == Placement:
        try:
            if hint is Mesh:
                return _decode_mesh(value, path)
            text = _decode_scalar(value, str, path)
            return Part.parse(text) if hint is Part else parse_placement(text)
        except AutoshardError as error:
            raise PlanError(error.what, error.where or path, error.fix) from None
    if dataclasses.is_dataclass(hint):
        return _decode_object(value, typing.cast(type, hint), path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise _mistyped(value, "a list", path)
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise _mistyped(value, f"a list of {len(arguments)}", path)
        return tuple(_decode(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _mistyped(value, "an object", path)
        return {key: _decode(item, arguments[1], _join(path, key)) for key, item in value.items()}
    return _decode_scalar(value, hint, path)


def _decode_mesh(value: object, path: str) -> Mesh:
    return Mesh(_decode(value, tuple[MeshAxis, ...], path))


_SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _decode_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    accepted = (int, float) if hint is float else hint
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, accepted):
        raise _mistyped(value, _SCALARS[hint], path)
    try:
        return hint(value)
    except OverflowError:
        raise PlanError("A number is too large.", where=path, fix=_REMAKE) from None


def _mistyped(value: object, wanted: str, path: str) -> PlanError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
    return PlanError(f"A field holds {shown} where {wanted} is wanted.", where=path, fix=_REMAKE)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---- what types cannot say --------------------------------------------------------------------


def _check(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other.

    Raises:
        PlanError: an unknown mode or search, or a weight that does not fit the mesh.
    """
    for name, known in _CHOICES.items():
        if (value := getattr(plan, name)) not in known:
            raise PlanError(
                f"'{value}' is no {name}.", where=name, fix=f"It is one of: {', '.join(known)}."
            )
    for index, collective in enumerate(plan.collectives):
        if collective.phase not in ("forward", "backward"):
            raise PlanError(
                f"'{collective.phase}' is no phase.",
                where=f"collectives[{index}].phase",
                fix="It is one of: forward, backward.",
            )
    for index, weight in enumerate(plan.weights):
        path = f"weights[{index}]"
        if not weight.fqns:
            raise PlanError("A weight has no name.", where=f"{path}.fqns", fix=_REMAKE)
        if len(weight.placements) != len(plan.mesh.axes):
            raise PlanError(
                f"A weight has {len(weight.placements)} placements on a mesh of "
                f"{len(plan.mesh.axes)} axes ({plan.mesh}).",
                where=f"{path}.placements",
                fix="Give one placement for each axis.",
            )
        for placement in weight.placements:
            fits = not isinstance(placement, Shard) or placement.dim < len(weight.shape)
            if not fits or not isinstance(placement, Invariant | Shard):
                raise PlanError(
                    f"A weight of shape {list(weight.shape)} cannot be stored as {placement}.",
                    where=f"{path}.placements",
                    fix="A weight is stored I, or S(dim) of a dimension it has.",
                )
