"""What the comparison must know of an architecture: the reference, how both are called, which stage is which."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from .capture import Tap

__all__ = ["Port", "Recorded", "ReferencePipeline", "Stage", "expand", "import_reference"]

Config = Mapping[str, Any]
Inputs = Mapping[str, torch.Tensor]


def import_reference(path: str) -> Any:
    """``package.module:Name``. References are optional packages, so they are named by text and imported here alone.

    Raises ImportError that says what to install.
    """
    module, _, name = path.partition(":")
    package = module.split(".")[0]
    try:
        return operator.attrgetter(name)(import_module(module))
    except ImportError as error:
        raise ImportError(f"the reference {path} can't be imported ({error}): pip install -U {package}") from error
    except AttributeError:
        raise ImportError(f"this version of {module} has no {name}: pip install -U {package}") from None


@dataclass(frozen=True)
class Stage:
    """One tensor that both implementations compute.

    ours: where it is in ours; reference: where in the reference, None = the same place. ``{i}`` in the names stands
    for every number that ours has. compared(value, inputs) -> the part that must agree (positions of real tokens, say).
    """

    name: str
    ours: Tap
    reference: Tap | None = None
    compared: Callable[[torch.Tensor, Inputs], torch.Tensor] | None = None

    def at(self, index: int) -> Stage:
        def place(tap: Tap | None) -> Tap | None:
            return tap and Tap(tap.module.format(i=index), tap.what, tap.pick, tap.join)

        return Stage(self.name.format(i=index), place(self.ours), place(self.reference), self.compared)


@dataclass(frozen=True)
class Recorded:
    """A stage as a fixture holds it: the names in its file, and what makes the stage's tensor of them."""

    names: tuple[str, ...]
    make: Callable[..., torch.Tensor] = lambda tensor: tensor

    def of(self, recorded: Inputs) -> torch.Tensor | None:
        """None when the fixture lacks a name."""
        if any(name not in recorded for name in self.names):
            return None
        return self.make(*(recorded[name] for name in self.names))


@dataclass(frozen=True)
class ReferencePipeline:
    """What the published pipeline does around the network, where it is known.

    name: for messages; sigmas(steps, latent_height, latent_width) -> its schedule, the last one 0; timestep(sigma,
    latent_height, latent_width) -> what its network is given; clean(prompt) -> the text its tokenizer gets.
    """

    name: str
    sigmas: Callable[[int, int, int], list[float]] | None = None
    timestep: Callable[[float, int, int], float] | None = None
    clean: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Port:
    """One architecture's description.

    reference: dotted path of a class that takes the same constructor arguments and the same weights, None = there is
    none to import. run_ours(module, inputs), run_reference(module, inputs): one forward pass on inputs under the
    reference's names, returning the output. tiny: card -> constructor arguments of a random model. inputs(config,
    generator): inputs for a model so built. complete(config): arguments that ours works out and the reference wants
    spelled out. reference_weights(weights): under the reference's names, in its shapes. recorded: stage -> how a
    fixture holds it. fixtures: what fixtures call the architecture. pipelines: card -> what surrounds the network.
    latent, time: the names of those two inputs.
    """

    reference: str | None
    run_ours: Callable[[torch.nn.Module, Inputs], torch.Tensor]
    run_reference: Callable[[torch.nn.Module, Inputs], torch.Tensor] | None
    stages: tuple[Stage, ...]
    tiny: Mapping[str, Config]
    inputs: Callable[[Config, torch.Generator], Inputs]
    complete: Callable[[Config], dict[str, Any]] = dict
    reference_weights: Callable[[Inputs], Mapping[str, torch.Tensor]] = dict
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    fixtures: tuple[str, ...] = ()
    pipelines: Mapping[str, ReferencePipeline] = field(default_factory=dict)
    latent: str = "hidden_states"
    time: str = "timestep"

    def stages_of(self, module: torch.nn.Module) -> list[Stage]:
        """The stages that this module of ours has, one per block."""
        return [stage for pattern in self.stages for stage in expand(pattern, module)]


def expand(stage: Stage, module: torch.nn.Module) -> Iterator[Stage]:
    """The stage for every ``{i}`` for which the module has a submodule; nothing where it has none."""
    if "{i}" not in stage.ours.module:
        if _has(module, stage.ours.module):
            yield stage
        return
    index = 0
    while _has(module, (found := stage.at(index)).ours.module):
        yield found
        index += 1


def _has(module: torch.nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True
