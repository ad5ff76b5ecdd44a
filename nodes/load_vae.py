"""NativeDiTLoadVAE: a file of models/vae becomes a VAE."""

import copy

from ..host import AUTO, current_host
from ._choices import FLOATS
from .io import io

PIXEL_SPACE = "pixel_space"


class NativeDiTLoadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTLoadVAE",
            display_name="Load VAE (NativeDiT)",
            category="NativeDiT/loaders",
            description="Loads an autoencoder, also of kinds that ComfyUI has none for (CogView4's, Sana's DC-AE), and "
            "says clearly what is wrong when a file does not fit.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=_files(),
                    tooltip="A file in models/vae; pixel_space for models that work on pixels.",
                ),
                io.Combo.Input(
                    "precision",
                    options=[AUTO, *FLOATS],
                    default=AUTO,
                    tooltip="Number format of weights and computation. auto takes the best one that is safe for this "
                    "autoencoder on your device.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="For VAE Decode and VAE Encode.")],
        )

    @classmethod
    def execute(cls, file, precision=AUTO):
        return io.NodeOutput(current_host().load_vae(file, precision=precision))


def _files():
    """A list of the host's own kind, which may know more about its files than their names."""
    files = copy.copy(current_host().list_files("vae"))
    files.append(PIXEL_SPACE)
    return files
