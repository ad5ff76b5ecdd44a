"""NativeDiTEmptyLatent: an empty LATENT with the channels and the size that the connected MODEL wants."""

from ..host import current_host
from .io import io


class NativeDiTEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTEmptyLatent",
            display_name="Empty Latent (NativeDiT)",
            category="NativeDiT/latent",
            description="An empty latent with the right number of channels and the right size for the connected model, "
            "whatever its autoencoder, or none.",
            inputs=[
                io.Model.Input("model", tooltip="The model that will be sampled."),
                io.Int.Input(
                    "width",
                    default=1024,
                    min=0,
                    max=16384,
                    step=8,
                    tooltip="Picture width in pixels; 0 = the model's own.",
                ),
                io.Int.Input(
                    "height",
                    default=1024,
                    min=0,
                    max=16384,
                    step=8,
                    tooltip="Picture height in pixels; 0 = the model's own.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="How many pictures at once."),
            ],
            outputs=[io.Latent.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, model, width, height, batch_size):
        return io.NodeOutput(current_host().empty_latent(model, width=width, height=height, batch_size=batch_size))
