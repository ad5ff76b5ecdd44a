"""NativeDiTQuantizeModel: the MODEL in the graph with quantized weights, LoRA and merges baked in."""

import re

from ..host import CARD, current_host
from ..quant.formats import OFFERED
from ._choices import policy_input
from .io import io


class NativeDiTQuantizeModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTQuantizeModel",
            display_name="Quantize Model (NativeDiT)",
            category="NativeDiT/quantization",
            description="Quantizes the model as it is in the graph: LoRA and merges before this node are baked in, one "
            "layer at a time. The incoming model stays as it is.",
            inputs=[
                io.Model.Input("model", tooltip="The model to quantize, with its LoRA and merges."),
                io.Combo.Input(
                    "format",
                    options=list(OFFERED),
                    default=OFFERED[0],
                    tooltip="How weights are stored. int8_convrot keeps most quality at half of bfloat16's size.",
                ),
                policy_input(),
                io.String.Input(
                    "keep",
                    default="",
                    multiline=True,
                    tooltip="Layers to leave alone, one pattern per line: blocks.0.*, *.mlp.down. Empty = none.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The quantized model, for samplers, LoRA loaders and save nodes.")],
        )

    @classmethod
    def execute(cls, model, format, policy=CARD, keep=""):
        patterns = [pattern for pattern in re.split(r"[\s,]+", keep) if pattern]
        return io.NodeOutput(current_host().quantize_model(model, precision=format, policy=policy, keep=patterns))
