"""The nodes that save a model, a text encoder or an autoencoder of the graph as a file."""

from ..host import AS_STORED, CARD, NO_STATISTICS, PLAIN_ROUNDING, Graph, current_host
from ._choices import FLOATS, PRECISIONS, craft_inputs, policy_input, prefix_input
from .io import io

_HIDDEN = [io.Hidden.prompt, io.Hidden.extra_pnginfo]
_FILE = "Path of the file that was written."


def _precision(options):
    return io.Combo.Input(
        "precision",
        options=options,
        default=AS_STORED,
        tooltip="as stored keeps the format of every weight, to the bit. A number format undoes quantization; "
        "a quantization format quantizes what is not quantized yet.",
    )


def _graph(cls) -> Graph:
    return Graph(cls.hidden.prompt, cls.hidden.extra_pnginfo)


def _written(saved):
    ui = {"files": [dict(one.shown) for one in saved], "text": [one.text for one in saved]}
    return io.NodeOutput("\n".join(one.path for one in saved), ui=ui)


class NativeDiTSaveDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTSaveDiffusionModel",
            display_name="Save Diffusion Model (NativeDiT)",
            category="NativeDiT/save",
            description="Writes a model with its LoRA and merges baked in as one file that ComfyUI's Load Diffusion "
            "Model loads. The file appears complete or not at all.",
            inputs=[
                io.Model.Input("model", tooltip="The model to save."),
                prefix_input("diffusion_models/NativeDiT"),
                _precision(PRECISIONS),
                policy_input(),
                *craft_inputs(),
            ],
            outputs=[io.String.Output(tooltip=_FILE)],
            hidden=_HIDDEN,
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, policy=CARD, calibration=NO_STATISTICS, **_):
        return current_host().fingerprint_rules(policy or CARD, calibration or NO_STATISTICS)

    @classmethod
    def execute(
        cls,
        model,
        filename_prefix,
        precision=AS_STORED,
        policy=CARD,
        calibration=NO_STATISTICS,
        rounding=PLAIN_ROUNDING,
        smooth=False,
    ):
        saved = current_host().save_diffusion_model(
            model,
            prefix=filename_prefix,
            precision=precision,
            policy=policy,
            calibration=calibration,
            rounding=rounding,
            smooth=smooth,
            graph=_graph(cls),
        )
        return _written([saved])


class NativeDiTSaveTextEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTSaveTextEncoder",
            display_name="Save Text Encoder (NativeDiT)",
            category="NativeDiT/save",
            description="Writes a text encoder with its tokenizer and with LoRA baked in. A CLIP of several text "
            "encoders gives one file each.",
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder to save."),
                prefix_input("text_encoders/NativeDiT"),
                _precision(PRECISIONS),
                policy_input(),
            ],
            outputs=[
                io.String.Output(tooltip="Path of the file that was written; one line each if there are several.")
            ],
            hidden=_HIDDEN,
            is_output_node=True,
        )

    @classmethod
    def execute(cls, clip, filename_prefix, precision=AS_STORED, policy=CARD):
        saved = current_host().save_text_encoder(
            clip, prefix=filename_prefix, precision=precision, policy=policy, graph=_graph(cls)
        )
        return _written(saved)


class NativeDiTSaveVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTSaveVAE",
            display_name="Save VAE (NativeDiT)",
            category="NativeDiT/save",
            description="Writes an autoencoder as one file that ComfyUI's Load VAE loads.",
            inputs=[
                io.Vae.Input("vae", tooltip="The autoencoder to save."),
                prefix_input("vae/NativeDiT"),
                _precision([AS_STORED, *FLOATS]),
            ],
            outputs=[io.String.Output(tooltip=_FILE)],
            hidden=_HIDDEN,
            is_output_node=True,
        )

    @classmethod
    def execute(cls, vae, filename_prefix, precision=AS_STORED):
        saved = current_host().save_vae(vae, prefix=filename_prefix, precision=precision, graph=_graph(cls))
        return _written([saved])
