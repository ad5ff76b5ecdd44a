"""ComfyUI nodes (V3 schema). Each is one call on the Host."""

from .checkpoint_reports import NativeDiTCompareModels, NativeDiTInspectCheckpoint, NativeDiTRepairCheckpoint
from .empty_latent import NativeDiTEmptyLatent
from .load_diffusion_model import NativeDiTLoadDiffusionModel
from .load_text_encoder import NativeDiTLoadTextEncoder
from .quantize_model import NativeDiTQuantizeModel
from .save_models import NativeDiTSaveDiffusionModel, NativeDiTSaveTextEncoder, NativeDiTSaveVAE

NODES = [
    NativeDiTLoadDiffusionModel,
    NativeDiTLoadTextEncoder,
    NativeDiTEmptyLatent,
    NativeDiTQuantizeModel,
    NativeDiTSaveDiffusionModel,
    NativeDiTSaveTextEncoder,
    NativeDiTSaveVAE,
    NativeDiTInspectCheckpoint,
    NativeDiTRepairCheckpoint,
    NativeDiTCompareModels,
]
