"""NativeDiTNegativePrompt: encodes the text of what a picture shall not show."""

from ..host import current_host
from .io import io


class NativeDiTNegativePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTNegativePrompt",
            display_name="Negative Prompt (NativeDiT)",
            category="NativeDiT/conditioning",
            description="Encodes what the picture shall not show. Some models (Sana) read an instruction before every "
            "prompt but the negative one; this node leaves it out. For all others it is CLIP Text Encode. An empty "
            "negative prompt needs no such node.",
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder."),
                io.String.Input("text", multiline=True, dynamic_prompts=True, tooltip="What it shall not show."),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the negative input of a sampler.")],
        )

    @classmethod
    def execute(cls, clip, text):
        return io.NodeOutput(current_host().encode_negative_prompt(clip, text))
