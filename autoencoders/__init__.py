"""Native autoencoders: which file is which, and what a host must know about each.

Every kind is described in a module of this folder whose name ends in kinds, apart from the class that computes, so that
a file's header is enough to recognise it and no torch is imported. Such a class encodes pixels into latents and decodes
latents into pixels, whole or in tiles, with plain tensors and nothing random. Latents are raw: what the diffusion model
sees is the latent format's business.
"""
# The descriptions are tuples called AUTOENCODERS. Pixels are [B, 3, H, W] in [-1, 1]; the methods are encode, decode,
# tiled_encode and tiled_decode.

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]
Renamer = Callable[[str], "str | tuple[str, ...]"]

# Where an autoencoder's keys start in the files people have.
PREFIXES = ("", "vae.", "first_stage_model.", "autoencoder.")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Another key layout of the same weights. ``marker`` is a key that only this layout has; ``renamer(shapes)`` gives
    the function from its keys to ours (some layouts number levels from the other end, so the shapes decide): a name, or
    the names of the equal parts that a fused weight falls into along its first dimension."""

    name: str
    marker: str
    renamer: Callable[[Shapes], Renamer]


@dataclass(frozen=True)
class Autoencoder:
    """One kind of autoencoder.

    module: dotted path of the class; detect(shapes, prefix): constructor arguments from keys in our layout, or None for
    a foreign file; compression: picture pixels per latent pixel, each way; latent_format: a name in latent_formats;
    dtypes: safe for computation, best first.
    """

    name: str
    title: str
    module: str
    detect: Callable[[Shapes, str], Config | None]
    compression: int
    latent_channels: int
    latent_format: str
    layouts: tuple[Layout, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def match(self, shapes: Shapes, prefix: str = "") -> AutoencoderMatch | None:
        """Whether these keys are this kind's, in any layout it knows. Never raises."""
        try:
            config = self.detect(shapes, prefix)
            if config is not None:
                return AutoencoderMatch(self, prefix, None, config)
            for layout in self.layouts:
                if prefix + layout.marker not in shapes:
                    continue
                own = {key[len(prefix) :]: shape for key, shape in shapes.items() if key.startswith(prefix)}
                match = AutoencoderMatch(self, prefix, layout.renamer(own), {}, layout.name)
                config = self.detect(
                    {
                        name: (shape[0] // len(names), *shape[1:]) if len(names) > 1 else shape
                        for key, shape in own.items()
                        for names in (match.names(prefix + key),)
                        for name in names
                    },
                    "",
                )
                if config is not None:
                    return replace(match, config=config)
        except Exception as error:  # a detection that raises would stop every autoencoder from loading inside ComfyUI
            log.warning("NativeDiT: the detection of %s failed on this file and is skipped: %r", self.name, error)
        return None


@dataclass(frozen=True)
class AutoencoderMatch:
    """A file recognised: whose it is, under which prefix, with which constructor arguments."""

    autoencoder: Autoencoder
    prefix: str
    renamer: Renamer | None
    config: Config
    layout: str | None = None

    def names(self, key: str) -> tuple[str, ...]:
        """Our names for a key of the file, one per part of a fused weight; none for a key outside the prefix."""
        if not key.startswith(self.prefix):
            return ()
        key = key[len(self.prefix) :]
        found = self.renamer(key) if self.renamer else key
        return (found,) if isinstance(found, str) else found

    def place(self, key: str, tensor: Any, expected: Shapes) -> dict[str, Any]:
        """The tensor of a key, as our module wants it: split, and in the shape that ``expected`` has for its name."""
        names = self.names(key)
        parts = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
        return {
            name: fit_shape(part, expected[name]) if name in expected else part
            for name, part in zip(names, parts, strict=False)
        }


@functools.cache
def autoencoders() -> tuple[Autoencoder, ...]:
    """All kinds, by name. A module that fails to import disables its own kinds, with one warning."""
    found: list[Autoencoder] = []
    for info in pkgutil.iter_modules(__path__):
        if not info.name.endswith("_kinds"):
            continue
        try:
            found += import_module(f".{info.name}", __name__).AUTOENCODERS
        except Exception as error:  # whatever a broken module raises must not take the others down
            log.warning("NativeDiT: the autoencoders of %s are disabled, it does not import: %r", info.name, error)
    return tuple(sorted(found, key=lambda kind: kind.name))


def get_autoencoder(name: str) -> Autoencoder:
    """The kind called ``name``. Raises ValueError that lists the known ones."""
    for kind in autoencoders():
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in autoencoders())
    raise ValueError(f"autoencoder {name!r} is unknown; known are {known}")


def find_autoencoder(
    shapes: Shapes, *, prefix: str | None = None, autoencoder: str | None = None
) -> AutoencoderMatch | None:
    """Whose file is this? None when nobody claims it.

    shapes: key -> shape; prefix: where the keys start, None = try the known ones; autoencoder: ask only this kind.
    """
    kinds = autoencoders() if autoencoder is None else (get_autoencoder(autoencoder),)
    for start in PREFIXES if prefix is None else (prefix,):
        for kind in kinds:
            match = kind.match(shapes, start)
            if match is not None:
                return match
    return None


def fit_shape(tensor: Any, shape: tuple[int, ...]) -> Any:
    """A tensor as the module wants it: a 1x1 convolution [O, I, 1, 1] and a linear layer [O, I] hold the same numbers,
    and layouts differ in which of the two they write. Any other difference is left for the strict check to name."""
    return tensor.reshape(shape) if tuple(tensor.shape) != fitted(tensor.shape, shape) else tensor


def fitted(have: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ``fit_shape`` gives a tensor of shape ``have``."""
    have, shape = tuple(have), tuple(shape)
    return shape if _without_ones(have) == _without_ones(shape) else have


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(shape)
    return shape[:2] if shape[2:] in ((1, 1), ()) else shape
