"""Values that travel along links, and latents as files, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import sys

from .declare import io


class PrimitiveInt(io.ComfyNode):
    @staticmethod
    def value():
        return io.Int.Input("value", min=-sys.maxsize, max=sys.maxsize, control_after_generate=True)

    output = io.Int.Output

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id=cls.__name__, inputs=[cls.value()], outputs=[cls.output()])

    @classmethod
    def execute(cls, value):
        return io.NodeOutput(value)


class PrimitiveFloat(PrimitiveInt):
    @staticmethod
    def value():
        return io.Float.Input("value", min=-sys.float_info.max, max=sys.float_info.max)

    output = io.Float.Output


class PrimitiveString(PrimitiveInt):
    @staticmethod
    def value():
        return io.String.Input("value")

    output = io.String.Output


class PrimitiveStringMultiline(PrimitiveString):
    pass


class PrimitiveBoolean(PrimitiveInt):
    @staticmethod
    def value():
        return io.Boolean.Input("value")

    output = io.Boolean.Output


class SeedNode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SeedNode",
            inputs=[io.Int.Input("seed", min=0, max=sys.maxsize, control_after_generate=True)],
            outputs=[io.Int.Output(display_name="seed")],
        )

    @classmethod
    def execute(cls, seed):
        return io.NodeOutput(seed)


NODES = [PrimitiveInt, PrimitiveFloat, PrimitiveString, PrimitiveStringMultiline, PrimitiveBoolean, SeedNode]
