"""From an autoencoder's file (or a diffusers folder) to a module in memory."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..autoencoders import Autoencoder, autoencoders, find_autoencoder
from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..files.source import open_source
from ..supported_models import header_config, import_dotted
from .fill import check_keys
from .kinds import AUTOENCODER, kind_of, wrong_slot


def load_autoencoder(
    path: str | os.PathLike,
    *,
    autoencoder: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    operations: Any = None,
) -> tuple[torch.nn.Module, Autoencoder]:
    """The module on ``device``, in eval mode, and which kind it is.

    autoencoder: a kind's name, None = recognise; config: constructor arguments that override shapes, header and
    config.json; dtype: of the weights, None = as stored; operations: the layer namespace, None = torch.nn.
    Raises FileError: no autoencoder, one of an unknown kind, a weight missing, left over or of the wrong shape.
    """
    with open_source(path, component="vae") as source:
        found = find_autoencoder(source.shapes(), autoencoder=autoencoder)
        if found is None:
            raise FileError(source.path, _what_else(source.shapes(), autoencoder))
        cls = import_dotted(found.autoencoder.module)
        accepted = inspect.signature(cls.__init__).parameters
        published = {**(source.config or {}), **header_config(source.metadata, "vae")}
        arguments = {**found.config, **{key: value for key, value in published.items() if key in accepted}}
        try:
            module = cls(**{**arguments, **(config or {})}, device="meta", operations=operations or torch.nn)
        except (TypeError, ValueError) as error:
            title = found.autoencoder.title
            raise FileError(source.path, f"its configuration does not fit a {title}: {error}") from error
        expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        state = {}
        for key in source:
            if found.names(key):
                state.update(found.place(key, source.read(key), expected))
        check_keys(source.path, expected, {name: tuple(value.shape) for name, value in state.items()})
        wanted = None if dtype is None else parse_dtype(dtype)
        module.load_state_dict({name: value.to(device, wanted) for name, value in state.items()}, assign=True)
        return module.requires_grad_(False).train(False), found.autoencoder


def _what_else(shapes: Mapping[str, tuple[int, ...]], autoencoder: str | None) -> str:
    kind = kind_of(shapes)
    if kind is not AUTOENCODER:
        return wrong_slot(kind, AUTOENCODER)
    if autoencoder is not None:
        return f"is an autoencoder, but not a {autoencoder}"
    known = ", ".join(one.title for one in autoencoders())
    return (
        f"is an autoencoder of a kind that NativeDiT does not know (known: {known}); ComfyUI's own Load VAE may load it"
    )
