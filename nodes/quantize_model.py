"""NativeDiTQuantizeModel: the model in the graph with its weights quantized and its patches baked in."""

import re

from ..host import AUTO, CARD, NO_STATISTICS, PLAIN_ROUNDING, current_host
from ..quant.formats import OFFERED
from ._choices import budget_inputs, craft_inputs, policy_input
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
                    options=[*OFFERED, AUTO],
                    default=OFFERED[0],
                    tooltip="How weights are stored. int8_convrot keeps most quality at half of bfloat16's size. auto: "
                    "a budget below chooses for each layer.",
                ),
                policy_input(),
                io.String.Input(
                    "keep",
                    default="",
                    multiline=True,
                    tooltip="Layers to leave alone, one pattern per line: blocks.0.*, *.mlp.down. Empty = none.",
                ),
                *budget_inputs(),
                *craft_inputs(),
            ],
            outputs=[
                io.Model.Output(tooltip="The quantized model, for samplers, LoRA loaders and save nodes."),
                io.String.Output(tooltip="Every layer with its format, its size and the reason."),
                io.Image.Output(tooltip="The same as a picture: size by format, and with a budget the error by layer."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, policy=CARD, calibration=NO_STATISTICS, **_):
        return current_host().fingerprint_rules(policy or CARD, calibration or NO_STATISTICS)

    @classmethod
    def execute(
        cls,
        model,
        format,
        policy=CARD,
        keep="",
        target_size=0.0,
        min_sqnr=0.0,
        calibration=NO_STATISTICS,
        rounding=PLAIN_ROUNDING,
        smooth=False,
    ):
        patterns = [pattern for pattern in re.split(r"[\s,]+", keep) if pattern]
        made = current_host().quantize_with_report(
            model,
            precision=format,
            policy=policy,
            keep=patterns,
            target_size=target_size,
            min_sqnr=min_sqnr,
            calibration=calibration,
            rounding=rounding,
            smooth=smooth,
        )
        return io.NodeOutput(made.model, made.report.text, made.report.image)
