"""NativeDiTLoadVAE: a file of models/vae becomes a VAE."""

import copy

from ..host import AUTO, current_host
from ..supported_models import architectures
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
                    tooltip="A file in models/vae; pixel_space for models that work on pixels. auto takes the best one "
                    "that is here for the architecture chosen below.",
                ),
                io.Combo.Input(
                    "precision",
                    options=[AUTO, *FLOATS],
                    default=AUTO,
                    tooltip="Number format of weights and computation. auto takes the best one that is safe for this "
                    "autoencoder on your device.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=[AUTO, *(card.name for card in architectures())],
                    default=AUTO,
                    optional=True,
                    tooltip="The diffusion model whose latents it decodes; asked only when file is auto.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="For VAE Decode and VAE Encode.")],
        )

    @classmethod
    def fingerprint_inputs(cls, file=None, architecture=AUTO, **_):
        return current_host().fingerprint("vae", file or "", architecture=architecture)

    @classmethod
    def execute(cls, file, precision=AUTO, architecture=AUTO):
        return io.NodeOutput(current_host().load_vae(file, precision=precision, architecture=architecture))


def _files():
    """A list of the host's own kind, which may know more about its files than their names."""
    files = copy.copy(current_host().list_files("vae"))
    files.extend([PIXEL_SPACE, AUTO])
    return files
