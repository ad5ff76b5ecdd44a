"""Values that travel along links, and latents as files, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import json
import sys

import torch

from ..files.errors import FileError
from ..files.source import open_source
from .declare import engine_host, io
from .pictures import NumberedFiles, file_digest, input_file

# Its presence says that the tensor is raw, not scaled as very old files have it.
VERSION_KEY = "latent_format_version_0"


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


class SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SaveLatent",
            inputs=[io.Latent.Input("samples"), io.String.Input("filename_prefix", default="latents/ComfyUI")],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, samples, filename_prefix="latents/ComfyUI"):
        from safetensors.torch import save

        texts = {"prompt": cls.hidden.prompt, **(cls.hidden.extra_pnginfo or {})}
        metadata = {key: json.dumps(value) for key, value in texts.items() if value is not None}
        tensors = {"latent_tensor": samples["samples"].contiguous(), VERSION_KEY: torch.zeros(0)}
        files = NumberedFiles(engine_host().output_dir, filename_prefix, suffix=".latent")
        return io.NodeOutput(ui={"latents": [files.write(save(tensors, metadata))]})


class LoadLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="LoadLatent", inputs=[io.String.Input("latent")], outputs=[io.Latent.Output()])

    @classmethod
    def validate_inputs(cls, latent):
        return input_file(engine_host(), latent)[1] or True

    @classmethod
    def fingerprint_inputs(cls, latent):
        return file_digest(input_file(engine_host(), latent)[0])

    @classmethod
    def execute(cls, latent):
        with open_source(input_file(engine_host(), latent)[0]) as source:
            if VERSION_KEY not in source:
                raise FileError(source.path, "is not a latent that SaveLatent wrote, or of a kind too old to know")
            return io.NodeOutput({"samples": source.read("latent_tensor").float()})


NODES = [
    PrimitiveInt,
    PrimitiveFloat,
    PrimitiveString,
    PrimitiveStringMultiline,
    PrimitiveBoolean,
    SeedNode,
    SaveLatent,
    LoadLatent,
]
