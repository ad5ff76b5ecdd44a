"""NativeDiTLoadTextEncoder: a file of models/text_encoders becomes a CLIP."""

from ..host import AS_STORED, AUTO, current_host
from ..supported_models import architectures
from .io import io


class NativeDiTLoadTextEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        names = [card.name for card in architectures() if card.prompt is not None]
        return io.Schema(
            node_id="NativeDiTLoadTextEncoder",
            display_name="Load Text Encoder (NativeDiT)",
            category="NativeDiT/loaders",
            description="Loads a text encoder with its tokenizer and prepares prompts the way the chosen model was "
            "trained with.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=current_host().list_files("text_encoders"),
                    tooltip="A file in models/text_encoders.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=[AUTO, *names],
                    default=AUTO,
                    tooltip="The diffusion model that will read the prompt. auto works when only one model uses this "
                    "text encoder.",
                ),
                io.Combo.Input(
                    "precision",
                    options=[AS_STORED, "bfloat16", "float16", "float32"],
                    default=AS_STORED,
                    tooltip="Number format of the weights in memory. as stored keeps the file's own.",
                ),
            ],
            outputs=[io.Clip.Output(tooltip="For CLIP Text Encode.")],
        )

    @classmethod
    def execute(cls, file, architecture=AUTO, precision=AS_STORED):
        return io.NodeOutput(current_host().load_text_encoder(file, architecture=architecture, precision=precision))
