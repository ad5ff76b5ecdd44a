"""NativeDiTSizeConditions, NativeDiTAdaptiveProjectedGuidance: what else a model can be told, and how it is guided."""

from ..host import current_host
from .io import io


def _side(name, tooltip):
    return io.Int.Input(name, default=0, min=0, max=16384, tooltip=tooltip)


class NativeDiTSizeConditions(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        own = "0 = that of the picture being made."
        return io.Schema(
            node_id="NativeDiTSizeConditions",
            display_name="Size Conditions (NativeDiT)",
            category="NativeDiT/conditioning",
            description="Tells a model that was trained with sizes (CogView4) which size and which part of a picture "
            "to imagine. Without this node it is told the size of the picture being made, uncropped.",
            inputs=[
                io.Conditioning.Input("conditioning", tooltip="The prompt; do the same with the negative one."),
                _side("original_width", f"Width of the imagined original, in pixels. {own}"),
                _side("original_height", f"Height of the imagined original, in pixels. {own}"),
                _side("crop_left", "Pixels cut off on its left."),
                _side("crop_top", "Pixels cut off at its top."),
                _side("target_width", f"Width after scaling, in pixels. {own}"),
                _side("target_height", f"Height after scaling, in pixels. {own}"),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(
        cls,
        conditioning,
        original_width=0,
        original_height=0,
        crop_left=0,
        crop_top=0,
        target_width=0,
        target_height=0,
    ):
        values = {"crop_coords": (crop_top, crop_left)}
        for name, width, height in (
            ("original", original_width, original_height),
            ("target", target_width, target_height),
        ):
            if bool(width) != bool(height):
                raise ValueError(f"{name}_width {width} and {name}_height {height}: give both, or 0 for both")
            if width:
                values[f"{name}_size"] = (height, width)
        return io.NodeOutput(current_host().set_conditions(conditioning, values))


class NativeDiTAdaptiveProjectedGuidance(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTAdaptiveProjectedGuidance",
            display_name="Adaptive Projected Guidance (NativeDiT)",
            category="NativeDiT/sampling",
            description="Guidance as F-Lite's publisher has it: the part that only makes the prediction stronger is "
            "left out, the rest is limited. Colours don't burn at high cfg.",
            inputs=[
                io.Model.Input("model", tooltip="The model to guide; cfg stays the sampler's."),
                io.Float.Input(
                    "limit",
                    default=0.03,
                    min=0.001,
                    max=10.0,
                    step=0.001,
                    round=0.001,
                    tooltip="Largest standard deviation of what guidance adds per unit of cfg. The publisher uses "
                    "0.03.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, model, limit=0.03):
        return io.NodeOutput(current_host().set_adaptive_projected_guidance(model, limit=limit))
