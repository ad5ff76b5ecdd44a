"""NativeDiTInspectCheckpoint, NativeDiTRepairCheckpoint, NativeDiTCompareModels: what is in files and models."""

from ..host import current_host
from ._choices import any_files, prefix_input
from .io import io

NO_ORIGINAL = "none"


def _state(file):
    folder, _, name = file.partition("/")
    return current_host().fingerprint(folder, name)


def _report(found):
    return io.NodeOutput(found.text, found.image, ui={"text": [found.text]})


def _report_outputs(picture):
    return [io.String.Output(tooltip="The report as text."), io.Image.Output(tooltip=picture)]


class NativeDiTInspectCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTInspectCheckpoint",
            display_name="Inspect Checkpoint (NativeDiT)",
            category="NativeDiT/quantization",
            description="Shows what a model file holds, layer by layer: formats, sizes, and what is wrong. Only "
            "the header is read.",
            inputs=[io.Combo.Input("file", options=any_files(), tooltip="A model file of any kind.")],
            outputs=_report_outputs("Formats by size, and every block's layers; problems are red."),
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, file=None, **_):
        return _state(file or "")

    @classmethod
    def execute(cls, file):
        return _report(current_host().inspect_checkpoint(file))


class NativeDiTRepairCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        files = any_files()
        return io.Schema(
            node_id="NativeDiTRepairCheckpoint",
            display_name="Repair Checkpoint (NativeDiT)",
            category="NativeDiT/quantization",
            description="Writes a quantized file in the form that ComfyUI loads. Weights keep their bits; the original "
            "file stays as it is.",
            inputs=[
                io.Combo.Input("file", options=files, tooltip="The quantized file."),
                prefix_input("repaired/NativeDiT"),
                io.Combo.Input(
                    "original",
                    options=[NO_ORIGINAL, *files],
                    default=NO_ORIGINAL,
                    tooltip="The unquantized model it was made from, if you have it: what the file does not say is "
                    "then settled by comparing weights.",
                ),
            ],
            outputs=[io.String.Output(tooltip="Path of the file that was written.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, file=None, original=NO_ORIGINAL, **_):
        return [_state(file or ""), _state(original)]

    @classmethod
    def execute(cls, file, filename_prefix, original=NO_ORIGINAL):
        given = None if original == NO_ORIGINAL else original
        saved = current_host().repair_checkpoint(file, prefix=filename_prefix, original=given)
        return io.NodeOutput(saved.path, ui={"files": [dict(saved.shown)], "text": [saved.text]})


class NativeDiTCompareModels(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTCompareModels",
            display_name="Compare Models (NativeDiT)",
            category="NativeDiT/quantization",
            description="Compares the weights of two models layer by layer and shows the signal to noise ratio: what "
            "quantization, a LoRA or a merge has changed.",
            inputs=[
                io.Model.Input("reference", tooltip="The model that counts as exact."),
                io.Model.Input("model", tooltip="The model that is compared with it."),
            ],
            outputs=_report_outputs("Signal to noise of every changed layer, in decibels."),
            is_output_node=True,
        )

    @classmethod
    def execute(cls, reference, model):
        return _report(current_host().compare_models(reference, model))
