"""NativeDiTLoadDiffusionModel: a file of models/diffusion_models becomes a MODEL."""

from ..host import AS_STORED, AUTO, current_host
from ..supported_models import architectures
from .io import io


class NativeDiTLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        names = [card.name for card in architectures() if card.module]
        return io.Schema(
            node_id="NativeDiTLoadDiffusionModel",
            display_name="Load Diffusion Model (NativeDiT)",
            category="NativeDiT/loaders",
            description="Loads a diffusion transformer and says clearly what is wrong when a file does not fit. "
            "ComfyUI's own Load Diffusion Model node loads the same files.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=current_host().list_files("diffusion_models"),
                    tooltip="A file in models/diffusion_models.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=[AUTO, *names],
                    default=AUTO,
                    tooltip="auto recognises the model by its weights. Choose one only if a file is not recognised.",
                ),
                io.Combo.Input(
                    "precision",
                    options=[AS_STORED, "bfloat16", "float16", "float32"],
                    default=AS_STORED,
                    tooltip="Number format of the weights in memory. as stored keeps the file's own.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for KSampler, LoRA loaders and every other MODEL node.")],
        )

    @classmethod
    def execute(cls, file, architecture=AUTO, precision=AS_STORED):
        return io.NodeOutput(current_host().load_diffusion_model(file, architecture=architecture, precision=precision))
