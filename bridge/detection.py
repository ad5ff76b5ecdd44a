"""ComfyUI's model detection asks our cards first. Nothing here may raise on a foreign file: every load passes by."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import comfy.model_detection
import comfy.supported_models

from ..files.errors import FileError
from ..supported_models import PREFIXES, Architecture, Match, architectures, header_config
from .config import config_class, image_model, stored_config
from .hooks import current_file, guarded, wrap_once
from .quantized import logical_shapes, report_unknown_format, unknown_format

log = logging.getLogger(__name__)

_registered: dict[str, Architecture] = {}
_only: contextvars.ContextVar[str | None] = contextvars.ContextVar("nativedit_only", default=None)


def install() -> None:
    """Register every architecture that has a module of ours, then the detection that finds them."""
    known = {getattr(model, "unet_config", {}).get("image_model") for model in comfy.supported_models.models}
    for card in architectures():
        if card.module is None or image_model(card) in known:
            continue
        with guarded(f"the architecture {card.name}"):
            comfy.supported_models.models.append(config_class(card))
            _registered[card.name] = card
    wrap_once(comfy.model_detection, "detect_unet_config", _detect)


@contextlib.contextmanager
def only(architecture: str | None) -> Iterator[None]:
    """Ask no other card than this one, as a loader's user wished; None = all."""
    token = _only.set(architecture)
    try:
        yield
    finally:
        _only.reset(token)


def _detect(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands before ComfyUI's function of that name, and takes whatever later versions give it besides."""
    # detect_unet_config(state_dict, key_prefix, metadata=None)
    named = dict(zip(("state_dict", "key_prefix", "metadata"), args, strict=False)) | kwargs
    state_dict, prefix = named.get("state_dict"), named.get("key_prefix", "")
    match = claim(state_dict, prefix, named.get("metadata"))
    if match is None:
        with guarded("the check for unknown quantized formats"):
            report_unknown_format(state_dict, prefix)
        return original(*args, **kwargs)
    core = _core_verdict(original, *args, **kwargs)
    if core is not None and core.get("image_model", "") != match.architecture.core_mistake:
        log.info("NativeDiT: this ComfyUI has %s itself and loads it", match.architecture.title)
        return core
    problem = unknown_format(state_dict, prefix)
    if problem is not None:
        raise FileError(current_file() or match.architecture.title, problem)
    return {**match.config, "image_model": image_model(match.architecture)}


def _core_verdict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except Exception as error:  # it reads shapes of a layout it was not made for
        log.debug("NativeDiT: ComfyUI's own detection stumbled over this file: %r", error)
        return None


def claim(state_dict: Any, prefix: str, metadata: Mapping[str, str] | None) -> Match | None:
    """The card of a state dict, with the file's own configuration applied; None for a file that is not ours."""
    try:
        shapes = logical_shapes(state_dict)
        wanted = _only.get()
        cards = [card for card in _registered.values() if wanted in (None, card.name)]
        for start in PREFIXES if prefix == "" else (prefix,):
            for card in cards:
                match = card.match(shapes, start)
                if match is not None:
                    for config in (stored_config(state_dict, match.prefix), metadata):
                        match.config.update(header_config(config))
                    return match
    except Exception as error:  # a state dict of a kind nobody thought of
        log.warning("NativeDiT: its detection failed on this file and is skipped: %r", error)
    return None
