"""A stand-in for the part of ComfyUI's V3 schema that our nodes use, so that the engine can read and run them.

Same names and meaning as ``comfy_api.latest.io``; everything is plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Input:
    """One input of a node."""

    id: str
    display_name: str | None = None
    optional: bool = False
    tooltip: str | None = None
    lazy: bool | None = None
    advanced: bool | None = None
    io_type: str = ""  # ComfyUI's name of the type: "INT", "MODEL", ...


@dataclass
class WidgetInput(Input):
    default: Any = None
    socketless: bool | None = None
    force_input: bool | None = None


@dataclass
class Output:
    id: str | None = None
    display_name: str | None = None
    tooltip: str | None = None
    is_output_list: bool = False
    io_type: str = ""


def _socket(type_name: str) -> type:
    """A type that only travels along links."""

    @dataclass
    class SocketInput(Input):
        io_type: str = type_name

    @dataclass
    class SocketOutput(Output):
        io_type: str = type_name

    return type(type_name.title(), (), {"io_type": type_name, "Input": SocketInput, "Output": SocketOutput})


class Int:
    io_type = "INT"

    @dataclass
    class Input(WidgetInput):
        min: int | None = None
        max: int | None = None
        step: int | None = None
        control_after_generate: bool | None = None
        io_type: str = "INT"

    @dataclass
    class Output(Output):
        io_type: str = "INT"


class Float:
    io_type = "FLOAT"

    @dataclass
    class Input(WidgetInput):
        min: float | None = None
        max: float | None = None
        step: float | None = None
        round: float | None = None
        io_type: str = "FLOAT"

    @dataclass
    class Output(Output):
        io_type: str = "FLOAT"


class String:
    io_type = "STRING"

    @dataclass
    class Input(WidgetInput):
        multiline: bool = False
        placeholder: str | None = None
        dynamic_prompts: bool | None = None
        io_type: str = "STRING"

    @dataclass
    class Output(Output):
        io_type: str = "STRING"


class Boolean:
    io_type = "BOOLEAN"

    @dataclass
    class Input(WidgetInput):
        label_on: str | None = None
        label_off: str | None = None
        io_type: str = "BOOLEAN"

    @dataclass
    class Output(Output):
        io_type: str = "BOOLEAN"


class Combo:
    io_type = "COMBO"

    @dataclass
    class Input(WidgetInput):
        options: list[Any] = field(default_factory=list)
        io_type: str = "COMBO"

    @dataclass
    class Output(Output):
        io_type: str = "COMBO"


Model = _socket("MODEL")
Clip = _socket("CLIP")
Vae = _socket("VAE")
Latent = _socket("LATENT")
Image = _socket("IMAGE")
Mask = _socket("MASK")
Conditioning = _socket("CONDITIONING")
Sampler = _socket("SAMPLER")
Sigmas = _socket("SIGMAS")
Noise = _socket("NOISE")
Guider = _socket("GUIDER")


class Hidden:
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"
    unique_id = "UNIQUE_ID"


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    description: str = ""
    is_output_node: bool = False
    is_experimental: bool = False
    is_deprecated: bool = False
    not_idempotent: bool = False


class NodeOutput:
    """What ``execute`` returns: the outputs by position, and what the interface shows (``ui``)."""

    def __init__(self, *args: Any, ui: dict[str, Any] | None = None):
        self.args = args
        self.ui = ui

    @property
    def result(self) -> tuple[Any, ...]:
        return self.args


class ComfyNode:
    """Base class of nodes: ``define_schema`` and ``execute`` are class methods, instances do not exist."""

    @classmethod
    def define_schema(cls) -> Schema:
        raise TypeError(f"{cls.__name__} does not define a schema")
