"""What the command line plans: a model named by text, with its example inputs.

    path.py:factory               a callable in a file
    package.module:factory        a callable in an importable module
    transformers:CONFIG.json      a model of transformers from its config file, not downloaded

A factory returns a model, or (model, args), or (model, args, kwargs).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError, OptionsError

if TYPE_CHECKING:
    from torch import nn

_FORMS = "path.py:factory, package.module:factory or transformers:CONFIG.json"


@dataclass(frozen=True)
class Source:
    """A model and its example inputs, as `autoshard.plan` takes them."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def load_source(text: str, *, training: bool = True, device: str = "meta") -> Source:
    """The model that `text` names.

    Args:
        text: `path.py:factory`, `package.module:factory` or
            `transformers:CONFIG.json[?batch=4&seq=2048]`.
        training: whether a transformers model gets labels, so that it has a loss.
        device: where a transformers model is built; a factory decides for itself.

    Raises:
        OptionsError: there is no such file, module or factory, or it fails: the user's line is named.
    """
    place, colon, name = text.rpartition(":")
    if text.startswith("transformers:"):
        from autoshard.transformers_source import load_transformers

        model, kwargs = load_transformers(text.removeprefix("transformers:"), training, device)
        return Source(model, (), kwargs)
    if not colon or not place or not name:
        raise OptionsError(f"'{text}' names no model.", fix=f"Write {_FORMS}.")
    module = _load_file(Path(place)) if _is_file(place) else _load_module(place)
    return _call(_find(module, name, place), text, module)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or Path(place).is_file()


def _load_file(path: Path) -> ModuleType:
    """The module in the file `path`; files beside it can be imported by it."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise OptionsError(f"The model's file {what}.", where=str(path), fix=f"Write {_FORMS}.")
    name = f"autoshard_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise OptionsError("The model's file is no Python file.", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    with _blaming(f"{path} cannot be imported", str(path.resolve())):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    """The importable module `name`; the working folder is looked through first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise OptionsError(
            f"There is no module '{name}'.",
            fix=f"Install it, or run in the folder it is in. A model is named by {_FORMS}.",
        )
    with _blaming(f"The module {name} cannot be imported", spec.origin or ""):
        return importlib.import_module(name)


def _find(module: ModuleType, name: str, place: str) -> object:
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [other for other in vars(module) if not other.startswith("_")]
            near = difflib.get_close_matches(name, public, n=3, cutoff=0.5)
            raise OptionsError(
                f"There is no '{name}' in {place}.",
                where=str(module.__file__ or place),
                fix=f"Did you mean {' or '.join(near)}?" if near else "Name a function in it.",
            )
        found = getattr(found, part)
    return found


def _call(factory: object, text: str, module: ModuleType) -> Source:
    """What `factory` makes; a module that is no class stands for itself."""
    from torch import nn

    if isinstance(factory, nn.Module):
        return Source(factory)
    if not callable(factory):
        raise OptionsError(
            f"'{text}' is {_described(factory)}, not a callable that returns a model.",
            where=str(module.__file__ or text),
        )
    with _blaming(f"'{text}' raised an error", str(module.__file__ or ""), _definition(factory)):
        made = factory()
    model, args, kwargs = made, (), {}
    if isinstance(made, tuple | list) and len(made) in (2, 3):
        model, args, kwargs = made if len(made) == 3 else (*made, {})
    if not isinstance(model, nn.Module):
        raise OptionsError(
            f"'{text}' returns {_described(made)}, not a model.",
            where=str(module.__file__ or text),
            fix="Return a model, or (model, args), or (model, args, kwargs).",
        )
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise OptionsError(
            f"The example inputs of '{text}' are {_described(args)} and {_described(kwargs)}.",
            where=str(module.__file__ or text),
            fix="Return (model, args, kwargs): args a tuple, kwargs a dict; one input x is (x,).",
        )
    return Source(model, tuple(args), dict(kwargs))


def _described(value: object) -> str:
    if isinstance(value, tuple | list):
        inner = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of ({inner})"
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _definition(factory: object) -> str:
    """Where `factory` is defined: a file and a line; empty where it is not known."""
    code = getattr(factory, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""


@contextmanager
def _blaming(what: str, path: str, definition: str = "") -> Iterator[None]:
    """Turn an error of the user's code into one message that names the user's line.

    `path` is the user's file; `definition` is named where none of its lines was reached.

    Raises:
        OptionsError: the code in the block raised an error; autoshard's own are passed on.
    """
    try:
        yield
    except (AutoshardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        raise OptionsError(f"{what}: {text}", where=_line(error, path, definition)) from error


def _line(error: BaseException, path: str, definition: str) -> str:
    """The innermost line of the file `path` that led to `error`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path]
    if not own:
        return definition or path
    frame = own[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
