"""NativeDiTConvertCheckpoint: a model on disk in another layout."""

from ..checkpoints.folders import ALL, LAYOUTS
from ..host import AUTO, current_host
from ..supported_models import architectures
from ._choices import any_files, prefix_input
from .io import io

COMPONENTS = ["transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "vae"]


class NativeDiTConvertCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTConvertCheckpoint",
            display_name="Convert Checkpoint (NativeDiT)",
            category="NativeDiT/save",
            description="Writes a model in another layout: diffusers folders, shards, prefixed files and pickles "
            "become one file that ComfyUI loads, or the other way round. Quantized layers keep their bits; every key "
            "is accounted for.",
            inputs=[
                io.Combo.Input(
                    "source",
                    options=[*current_host().list_model_folders(), *any_files()],
                    tooltip="A folder or a file in ComfyUI's models folders. Put diffusers folders into "
                    "models/diffusers.",
                ),
                prefix_input("diffusion_models/NativeDiT"),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default=LAYOUTS[0],
                    tooltip="comfy: one safetensors file. diffusers: a folder with config.json.",
                ),
                io.Combo.Input(
                    "component",
                    options=[AUTO, ALL, *COMPONENTS],
                    default=AUTO,
                    tooltip="Of a whole pipeline: the part to convert, auto = transformer. all: every part of a "
                    "pipeline or of an all-in-one checkpoint, one file each, in a new folder.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=[AUTO, *(card.name for card in architectures())],
                    default=AUTO,
                    tooltip="auto recognises the model by its weights. Choose one only if it is not recognised.",
                ),
            ],
            outputs=[io.String.Output(tooltip="Path of the file or folder that was written.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, source=None, **_):
        return current_host().fingerprint_source(source or "")

    @classmethod
    def execute(cls, source, filename_prefix, layout=LAYOUTS[0], component=AUTO, architecture=AUTO):
        saved = current_host().convert_checkpoint(
            source, prefix=filename_prefix, layout=layout, component=component, architecture=architecture
        )
        return io.NodeOutput(saved.path, ui={"files": [dict(saved.shown)], "text": [saved.text]})
