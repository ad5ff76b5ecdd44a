"""Prompts, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import torch

from .declare import io


class CLIPTextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="CLIPTextEncode",
            inputs=[io.String.Input("text", multiline=True), io.Clip.Input("clip")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text, clip):
        return io.NodeOutput([clip.encode(text)])


class ConditioningZeroOut(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ConditioningZeroOut",
            inputs=[io.Conditioning.Input("conditioning")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning):
        zeroed = []
        for states, extra in conditioning:
            pooled = extra.get("pooled_output")
            if pooled is not None:
                extra = {**extra, "pooled_output": torch.zeros_like(pooled)}
            zeroed.append((torch.zeros_like(states), extra))
        return io.NodeOutput(zeroed)


class ConditioningCombine(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ConditioningCombine",
            inputs=[io.Conditioning.Input("conditioning_1"), io.Conditioning.Input("conditioning_2")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning_1, conditioning_2):
        return io.NodeOutput([*conditioning_1, *conditioning_2])


class FluxGuidance(io.ComfyNode):
    """For every model that embeds its guidance scale, not only FLUX."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="FluxGuidance",
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Float.Input("guidance", default=3.5, min=0.0, max=100.0, step=0.1),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, guidance):
        return io.NodeOutput([(states, {**extra, "guidance": guidance}) for states, extra in conditioning])


NODES = [CLIPTextEncode, ConditioningZeroOut, ConditioningCombine, FluxGuidance]
