"""NativeDiTPatchRenormalizedGuidance: the guidance that the publisher of Nucleus-Image has."""

from ..host import current_host
from .io import io


class NativeDiTPatchRenormalizedGuidance(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTPatchRenormalizedGuidance",
            display_name="Patch Renormalized Guidance (NativeDiT)",
            category="NativeDiT/sampling",
            description="Guidance as Nucleus-Image's publisher has it: every patch of the guided prediction is brought "
            "back to the length it had without guidance. Contrast and colours don't burn at high cfg.",
            inputs=[
                io.Model.Input("model", tooltip="The model to guide; cfg stays the sampler's."),
                io.Int.Input(
                    "patch_size",
                    default=2,
                    min=1,
                    max=16,
                    tooltip="Side of a patch in latent pixels: what the model takes as one token, 2 for Nucleus-Image.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, model, patch_size=2):
        return io.NodeOutput(current_host().set_patch_renormalized_guidance(model, patch_size=patch_size))
