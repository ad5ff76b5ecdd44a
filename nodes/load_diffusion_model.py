"""NativeDiTLoadDiffusionModel: a file of models/diffusion_models becomes a MODEL, quantized on the way if wished."""

import copy

from ..host import AS_STORED, AUTO, CARD, NO_STATISTICS, PLAIN_ROUNDING, current_host
from ..quant.formats import is_format
from ..supported_models import architectures
from ._choices import PRECISIONS, budget_inputs, craft_inputs, policy_input
from .io import io


class NativeDiTLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        names = [card.name for card in architectures()]
        return io.Schema(
            node_id="NativeDiTLoadDiffusionModel",
            display_name="Load Diffusion Model (NativeDiT)",
            category="NativeDiT/loaders",
            description="Loads a diffusion model, quantizes it on the way if you like, and says clearly what is wrong "
            "when a file does not fit. ComfyUI's own Load Diffusion Model node loads the same files.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=_files(),
                    tooltip="A file in models/diffusion_models, or the diffusion model in one of models/checkpoints. "
                    "auto takes the best one that is here for the architecture chosen below.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=[AUTO, *names],
                    default=AUTO,
                    tooltip="auto recognises the model by its weights. Choose one if a file is not recognised, or to "
                    "say which model file auto is to find.",
                ),
                io.Combo.Input(
                    "precision",
                    options=PRECISIONS,
                    default=AS_STORED,
                    tooltip="Format of the weights in memory. as stored keeps the file's own; the formats from "
                    "int8_convrot on quantize an unquantized file while it is loaded.",
                ),
                policy_input(optional=True),
                *budget_inputs(),
                *craft_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="The model, for KSampler, LoRA loaders and every other MODEL node.")],
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        file=None,
        architecture=AUTO,
        precision=AS_STORED,
        policy=CARD,
        target_size=0.0,
        min_sqnr=0.0,
        calibration=NO_STATISTICS,
        **_,
    ):
        policy = policy if is_format(precision) or target_size or min_sqnr else CARD
        state = current_host().fingerprint("diffusion_models", file or "", policy, architecture)
        return f"{state} {current_host().fingerprint_rules(CARD, calibration or NO_STATISTICS)}"

    @classmethod
    def execute(
        cls,
        file,
        architecture=AUTO,
        precision=AS_STORED,
        policy=CARD,
        target_size=0.0,
        min_sqnr=0.0,
        calibration=NO_STATISTICS,
        rounding=PLAIN_ROUNDING,
        smooth=False,
    ):
        return io.NodeOutput(
            current_host().load_diffusion_model(
                file,
                architecture=architecture,
                precision=precision,
                policy=policy,
                target_size=target_size,
                min_sqnr=min_sqnr,
                calibration=calibration,
                rounding=rounding,
                smooth=smooth,
            )
        )


def _files():
    """A list of the host's own kind, which may know more about its files than their names."""
    files = copy.copy(current_host().list_files("diffusion_models"))
    files.extend(f"checkpoints/{name}" for name in current_host().list_files("checkpoints"))
    files.append(AUTO)
    return files
