"""NativeDiTLoadTextEncoder: a file of models/text_encoders becomes a CLIP."""

import copy

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
                    options=_files(),
                    tooltip="A file in models/text_encoders. auto takes the best one that is here for the architecture "
                    "chosen below.",
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
    def fingerprint_inputs(cls, file=None, architecture=AUTO, **_):
        return current_host().fingerprint("text_encoders", file or "", architecture=architecture)

    @classmethod
    def execute(cls, file, architecture=AUTO, precision=AS_STORED):
        return io.NodeOutput(current_host().load_text_encoder(file, architecture=architecture, precision=precision))


def _files():
    """A list of the host's own kind, which may know more about its files than their names."""
    files = copy.copy(current_host().list_files("text_encoders"))
    files.append(AUTO)
    return files
