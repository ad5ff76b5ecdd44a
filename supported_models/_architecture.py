"""What a card says about an architecture. Pure data and small pure functions; no torch module is imported here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._two_way import TwoWayMap

if TYPE_CHECKING:
    from ..quant.policy import CardPolicy
    from ..text_encoders.prompt import Prompt

Shapes = Mapping[str, tuple[int, ...]]

log = logging.getLogger(__name__)

ROOT_PACKAGE = __package__.rpartition(".")[0]


def import_dotted(path: str) -> Any:
    """Import ``.folder.module:Name`` relative to this package, whatever name a host imported it under."""
    module, _, name = path.partition(":")
    return vars(import_module(module, ROOT_PACKAGE))[name]


@dataclass(frozen=True)
class Defaults:
    """The publisher's settings; what "auto" means in our nodes."""

    steps: int
    cfg: float
    sampler: str
    scheduler: str
    width: int
    height: int
    negative_prompt: str = ""


@dataclass(frozen=True)
class Sampling:
    """How a flow model is sampled: x_sigma = (1 - sigma) * x0 + sigma * noise_scale * noise.

    prediction: "velocity" (noise - data), "-velocity" (data - noise) or "x0".
    shift: static time shift; multiplier: the reference transformer's timestep is sigma * multiplier.
    x0_sigma_floor: for "x0", the reference's velocity is (x - x0) / max(sigma, floor).
    shift_of_latent: dotted path of f(latent_height, latent_width) -> shift, for models whose shift follows the size of
    the picture (``shift`` is then that of the default size).
    timestep_before_shift: the transformer is given the time t before its shift, t * multiplier, where
    sigma = shift * t / (1 + (shift - 1) * t).
    sigmas: dotted path of f(steps) -> the publisher's sigmas, the last one 0, for models distilled to a schedule of
    their own.
    guidance: the publisher's guidance scale for a model that is told it instead of being run twice; the module's
    ``forward`` takes it as ``guidance``, times its ``guidance_embeds_scale``.
    times: dotted path of f(steps) -> the publisher's times before the shift, from 1 on and without the last 0, where no
    schedule that every sampler has gives the same numbers.
    """

    prediction: str = "velocity"
    shift: float = 1.0
    multiplier: float = 1.0
    noise_scale: float = 1.0
    x0_sigma_floor: float = 0.0
    shift_of_latent: str | None = None
    timestep_before_shift: bool = False
    sigmas: str | None = None
    times: str | None = None
    guidance: float | None = None

    def sigmas_for(self, steps: int) -> list[float] | None:
        """The publisher's own schedule of so many steps; None: the shift says it all."""
        return None if self.sigmas is None else import_dotted(self.sigmas)(steps)

    def published_schedule(self, steps: int, shift: float) -> list[float] | None:
        """``steps`` + 1 sigmas, the last one 0, exactly as the publisher's program has them; None: an ordinary schedule
        (the card's default) has them too."""
        if self.times is None:
            return self.sigmas_for(steps)
        return [shift * time / (1 + (shift - 1) * time) for time in import_dotted(self.times)(steps)] + [0.0]

    def shift_for(self, latent_height: int, latent_width: int) -> float:
        """The time shift for a latent of this size."""
        if self.shift_of_latent is None:
            return self.shift
        return import_dotted(self.shift_of_latent)(latent_height, latent_width)


@dataclass(frozen=True)
class Part:
    """A weight of ours inside a tensor of another layout: the ``index``-th of ``count`` equal parts along the first
    dimension, its two halves the other way round if ``swapped``, its last two dimensions exchanged if
    ``transposed``."""

    name: str
    index: int = 0
    count: int = 1
    swapped: bool = False
    transposed: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = (shape[0] // self.count, *shape[1:]) if self.count > 1 else tuple(shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def take(self, tensor: Any) -> Any:
        """The part, in memory of its own where it is less than the whole."""
        if self.count > 1:
            rows = tensor.shape[0] // self.count
            tensor = tensor[self.index * rows : (self.index + 1) * rows].clone()
        if self.transposed:
            tensor = tensor.transpose(-1, -2)
        return tensor.roll(tensor.shape[0] // 2, 0) if self.swapped else tensor


@dataclass(frozen=True)
class KeyMap:
    """Another key layout of the same weights: regular expressions from its keys to ours, first match wins.

    ``marker`` is a key that only this layout has (without prefix); ``prefixes`` are those it is published with.
    ``fused``: keys, after the rules, whose tensor holds several of our weights in equal parts along the first
    dimension, and what each part is called (replacements, first match wins). ``swapped``: our keys whose two halves
    along the first dimension are the other way round; ``transposed``: those whose last two dimensions are exchanged.
    ``ignored``: their keys that hold nothing of ours (tables computed anew, training's leftovers);
    ``config_from_shapes`` still sees them.
    """

    name: str
    marker: str
    rules: tuple[tuple[str, str], ...]
    prefixes: tuple[str, ...] = ("",)
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    swapped: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def rename(self, key: str) -> str:
        for pattern, replacement in self.rules:
            renamed, count = re.subn(pattern, replacement, key, count=1)
            if count:
                return renamed
        return key

    def parts(self, key: str) -> tuple[Part, ...]:
        """What of ours a tensor of this layout holds: one weight, several, or none."""
        if self._ignores(key):
            return ()
        renamed = self.rename(key)
        for pattern, replacements in self.fused:
            if re.search(pattern, renamed):
                names = [re.sub(pattern, replacement, renamed, count=1) for replacement in replacements]
                return tuple(self._part(name, i, len(names)) for i, name in enumerate(names))
        return (self._part(renamed),)

    def shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Our keys and shapes of a file in this layout, and what it ignores under its own keys."""
        renamed = {part.name: part.shape(shape) for key, shape in shapes.items() for part in self.parts(key)}
        return renamed | {key: tuple(shape) for key, shape in shapes.items() if self._ignores(key)}

    def _ignores(self, key: str) -> bool:
        return any(re.search(pattern, key) for pattern in self.ignored)

    def _part(self, name: str, index: int = 0, count: int = 1) -> Part:
        swapped, transposed = (
            any(re.search(pattern, name) for pattern in patterns) for patterns in (self.swapped, self.transposed)
        )
        return Part(name, index, count, swapped, transposed)


@dataclass(frozen=True)
class Match:
    """A file recognised: whose it is, under which prefix, in which layout (None: ours), with which constructor
    arguments."""

    architecture: Architecture
    prefix: str
    layout: KeyMap | TwoWayMap | None
    config: dict[str, Any]

    def rename(self, key: str) -> str | None:
        """Our module's name for a key of the file; None for a key outside the prefix."""
        if not key.startswith(self.prefix):
            return None
        key = key[len(self.prefix) :]
        return self.layout.rename(key) if self.layout else key

    def parts(self, key: str) -> tuple[Part, ...]:
        """Our module's weights that a tensor of the file holds; none for a key outside the prefix."""
        if not key.startswith(self.prefix):
            return ()
        key = key[len(self.prefix) :]
        if self.layout:
            return self.layout.parts(key)
        return () if any(re.search(pattern, key) for pattern in self.architecture.ignored) else (Part(key),)


def _strip(shapes: Shapes, prefix: str) -> Shapes:
    return {key[len(prefix) :]: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Architecture:
    """One card. Fields in the order of the questions in docs/architecture.md; a fact without a source stays empty."""

    # what is it?
    name: str
    title: str
    license: str
    repositories: tuple[str, ...]
    defaults: Defaults | None
    # is this file mine? telling keys (without prefix), and constructor arguments from logical shapes (packed
    # widths undone) or None = not mine; asked only when every telling key is there
    signature: tuple[str, ...]
    config_from_shapes: Callable[[Shapes], dict[str, Any] | None]
    # which module? None: core's (inside ComfyUI) or diffusers' (in the engine)
    module: str | None
    # how is it sampled?
    sampling: Sampling | None
    # which latent, text encoder, autoencoder?
    latent_format: str | None
    text_encoders: tuple[str, ...] = ()
    # hidden size of the published one, which tells apart models that read the same family
    text_encoder_width: int | None = None
    autoencoder: str | None = None
    prompt: Prompt | None = None
    # what the module is told besides, by the names of its ``forward``: pairs of whole numbers, height or top first
    conditions: tuple[str, ...] = ()
    # the image_model that ComfyUI's core takes such files for without having the architecture; any other that it names
    # means that it has
    core_mistake: str | None = None
    # which precisions are safe, best first; which parameters stay in float32 (regular expressions)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    keep_float32: tuple[str, ...] = ()
    # the sampling of variants that only the constructor arguments tell (f(arguments) -> Sampling); None: ``sampling``
    sampling_of_config: Callable[[Mapping[str, Any]], Sampling] | None = None
    # the publisher's settings for variants that shapes can't tell: word in the file's or repository's name -> settings,
    # asked in this order
    variants: Mapping[str, Defaults] = field(default_factory=dict)
    # memory per latent pixel relative to ComfyUI's own estimate (its memory_usage_factor)
    memory_usage_factor: float = 1.0
    # what may be quantized?
    quantization: CardPolicy | None = None
    # how do other layouts map? diffusers_class: the class that a diffusers folder's config.json names; ignored: keys
    # of published files that hold nothing of ours (regular expressions, in our layout)
    layouts: tuple[KeyMap | TwoWayMap, ...] = ()
    diffusers_class: str | None = None
    ignored: tuple[str, ...] = ()
    lora_prefixes: tuple[str, ...] = ("diffusion_model.", "transformer.", "", "base_model.model.")
    # which files? folder under models/ -> known file names, best first; downloads: file name -> address
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    downloads: Mapping[str, str] = field(default_factory=dict)

    def detect(self, shapes: Shapes, prefix: str = "") -> dict[str, Any] | None:
        """Constructor arguments if these are this architecture's keys and shapes, else None. Never raises.

        shapes: key -> logical shape of a whole file or header; only keys under ``prefix`` are looked at.
        """
        match = self.match(shapes, prefix)
        return None if match is None else match.config

    def match(self, shapes: Shapes, prefix: str = "") -> Match | None:
        """``detect``, which also tells the layout the keys are in. Our own layout is tried first."""
        try:
            if all(prefix + key in shapes for key in self.signature):
                config = self.config_from_shapes(_strip(shapes, prefix))
                if config is not None:
                    return Match(self, prefix, None, dict(config))
            for layout in self.layouts:
                for start in (prefix + inner for inner in layout.prefixes):
                    if start + layout.marker not in shapes:
                        continue
                    renamed = layout.shapes(_strip(shapes, start))
                    if all(key in renamed for key in self.signature):
                        config = self.config_from_shapes(renamed)
                        if config is not None:
                            return Match(self, start, layout, dict(config))
        except Exception as error:  # one card that raises would stop every model from loading inside ComfyUI
            log.warning("NativeDiT: the detection of %s failed on this file and is skipped: %r", self.name, error)
        return None

    def of_config(self, config: Mapping[str, Any]) -> Architecture:
        """This card with the sampling of the variant that has these constructor arguments."""
        if self.sampling_of_config is None:
            return self
        return replace(self, sampling=self.sampling_of_config(config))

    def defaults_for(self, name: str | None = None) -> Defaults | None:
        """The publisher's settings for a file or repository called so; its variant shows in the name alone."""
        words = re.split(r"[^a-z0-9]+", (name or "").lower())
        return next((settings for word, settings in self.variants.items() if word in words), self.defaults)

    @property
    def two_way(self) -> TwoWayMap | None:
        """The map between our layout and diffusers', None where the two are one."""
        return next((layout for layout in self.layouts if isinstance(layout, TwoWayMap)), None)

    def module_class(self) -> type:
        if self.module is None:
            raise ValueError(f"{self.title} has no module of ours: ComfyUI's core or diffusers loads it")
        return import_dotted(self.module)
