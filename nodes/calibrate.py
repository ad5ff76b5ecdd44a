"""NativeDiTCalibrateModel: what a model's layers are given while it samples, for quantizing it better."""

from ..host import Graph, current_host
from ._choices import prefix_input
from .io import io
from .sample import LARGEST_SEED


class NativeDiTCalibrateModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTCalibrateModel",
            display_name="Calibrate Model (NativeDiT)",
            category="NativeDiT/quantization",
            description="Samples the model and writes the largest and the mean size of every layer's inputs to a file. "
            "The nodes that quantize turn it into the input scales of float8 and nvfp4.",
            inputs=[
                io.Model.Input("model", tooltip="The unquantized model."),
                io.Conditioning.Input("positive", tooltip="A prompt of the kind that the model is used for."),
                io.Conditioning.Input("negative", tooltip="Unused at cfg 1."),
                io.Latent.Input("latent_image", tooltip="An empty latent of the usual size."),
                io.Int.Input("seed", default=0, min=0, max=LARGEST_SEED, tooltip="Of the noise."),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=10000,
                    tooltip="Number of steps; 0 = the publisher's. A few are enough.",
                ),
                io.Float.Input(
                    "cfg",
                    default=-1.0,
                    min=-1.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="1 = without the negative prompt, below 0 = the publisher's.",
                ),
                prefix_input("calibration/NativeDiT"),
            ],
            outputs=[
                io.String.Output(tooltip="Path of the file that was written."),
                io.Combo.Output(
                    display_name="calibration", tooltip="Its name, for the same input of the nodes that quantize."
                ),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, model, positive, negative, latent_image, seed, steps=0, cfg=-1.0, filename_prefix="calibration/NativeDiT"
    ):
        saved = current_host().calibrate_model(
            model,
            positive,
            negative,
            latent_image,
            seed=seed,
            steps=steps,
            cfg=cfg,
            prefix=filename_prefix,
            graph=Graph(cls.hidden.prompt, node_id=cls.hidden.unique_id),
        )
        name = "/".join(filter(None, (saved.shown["subfolder"], saved.shown["filename"])))
        return io.NodeOutput(saved.path, name, ui={"files": [dict(saved.shown)], "text": [saved.text]})
