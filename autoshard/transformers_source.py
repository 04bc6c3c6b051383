"""Models of `transformers` from a config file: built with random weights, nothing is downloaded."""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from autoshard.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_SIZES = ("batch", "seq")
_LONGEST = 2048
_SEED = 0
_PER_TOKEN = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "TokenClassification")
_PER_SAMPLE = ("SequenceClassification", "ImageClassification")
_AUTO_CLASSES = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


def load_transformers(
    text: str, training: bool, device: str
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model of the config file that `text` names, `CONFIG.json[?batch=4&seq=2048]`, and its inputs.

    The class is the first of the config's `architectures`, else the first that transformers knows
    for the model's type: sequence to sequence, masked or causal language model, image classifier.
    Weights are random, or absent on the meta device; caches are off.

    Raises:
        OptionsError: transformers is missing, the file is no config, or the model wants inputs that
            are not made here.
    """
    path, _, query = text.partition("?")
    sizes, config = _sizes(query), _config(Path(path))
    import torch

    with torch.random.fork_rng(devices=[]), _defaults(config, device):
        torch.manual_seed(_SEED)
        model = _model(config, path)
        if not training:
            model.eval()
        return model, _inputs(model, sizes, training, path)


def _sizes(query: str) -> dict[str, int]:
    found = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _SIZES or not value.isdigit() or int(value) < 1:
            raise OptionsError(
                f"'{key}={value}' is no size of the example inputs.",
                where=f"?{query}",
                fix="Write ?batch=4&seq=2048: whole numbers, at least 1.",
            )
        found[key] = int(value)
    if query and not found:
        raise OptionsError(f"'?{query}' is not understood.", fix="Write ?batch=4&seq=2048.")
    return found


def _config(path: Path) -> PretrainedConfig:
    """The config in the file `path`, or in the config.json of the folder `path`."""
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise OptionsError("There is no such config file.", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise OptionsError(f"The config cannot be read: {error}.", where=str(path)) from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise OptionsError(
            "The file is no transformers config: it has no 'model_type'.", where=str(path)
        )
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError:
        raise OptionsError(
            "transformers is not installed.", where=str(path), fix="pip install transformers"
        ) from None
    try:
        config = AutoConfig.for_model(**data)
    except Exception as error:
        what = str(error).partition(". Should contain")[0]
        raise OptionsError(f"transformers refuses the config: {what}.", where=str(path)) from error
    config.use_cache = False
    return config


@contextmanager
def _defaults(config: PretrainedConfig, device: str) -> Iterator[None]:
    """Build on `device`, and in the config's dtype, as transformers itself does."""
    import torch

    before = torch.get_default_dtype()
    dtype = getattr(config, "dtype", None)
    try:
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            torch.set_default_dtype(dtype)
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _model(config: PretrainedConfig, path: str) -> PreTrainedModel:
    import transformers

    architecture = next(iter(config.architectures or ()), None)
    exact = getattr(transformers, str(architecture), None)
    try:
        if exact is not None:
            return exact(config)
        for name in _AUTO_CLASSES:
            try:
                return getattr(transformers, name).from_config(config)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise OptionsError(f"transformers cannot build the model: {text}", where=path) from error
    raise OptionsError(
        f"transformers has no model for the type '{config.model_type}'.",
        where=path,
        fix="Write a factory: path.py:factory.",
    )


def _inputs(
    model: PreTrainedModel, sizes: dict[str, int], training: bool, path: str
) -> dict[str, torch.Tensor]:
    """Example inputs of `model`: token ids or pixels, and labels where it has a loss and trains."""
    main = model.main_input_name
    config, classes = model.config.get_text_config(), model.config.num_labels or 2
    batch = sizes.get("batch", 1)
    tokens = (batch, sizes.get("seq", _sequence(config)))
    if main == "pixel_values" and "seq" not in sizes:
        inputs = {main: _pixels(model, batch)}
    elif main == "input_ids":
        inputs = {main: _integers(config.vocab_size, tokens)}
    else:
        what = "pixels, which have no 'seq'" if main == "pixel_values" else f"'{main}'"
        raise OptionsError(
            f"{type(model).__name__} takes {what}.",
            where=path,
            fix="Write a factory that returns (model, args, kwargs): path.py:factory.",
        )
    accepted, name = inspect.signature(model.forward).parameters, type(model).__name__
    if training and "labels" in accepted and name.endswith(_PER_SAMPLE):
        inputs["labels"] = _integers(classes, (batch,))
    elif training and "labels" in accepted and name.endswith(_PER_TOKEN):
        by_class = name.endswith("TokenClassification")
        inputs["labels"] = _integers(classes if by_class else config.vocab_size, tokens)
    elif "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _integers(config.vocab_size, tokens)
    return inputs


def _sequence(config: PretrainedConfig) -> int:
    """The longest power of two that the model's positions reach, up to `_LONGEST`."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", 512
    )
    return 1 << (min(int(positions), _LONGEST).bit_length() - 1)


def _integers(count: int, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.randint(count, shape)


def _pixels(model: PreTrainedModel, batch: int) -> torch.Tensor:
    import torch

    size = getattr(model.config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(model.config, "num_channels", 3)
    return torch.randn(batch, channels, height, width)
