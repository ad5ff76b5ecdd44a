"""ComfyUI nodes (V3 schema). Each is one call on the Host."""

from .calibrate import NativeDiTCalibrateModel
from .checkpoint_reports import NativeDiTCompareModels, NativeDiTInspectCheckpoint, NativeDiTRepairCheckpoint
from .convert import NativeDiTConvertCheckpoint
from .empty_latent import NativeDiTEmptyLatent
from .guidance import NativeDiTAdaptiveProjectedGuidance, NativeDiTSizeConditions
from .load_diffusion_model import NativeDiTLoadDiffusionModel
from .load_text_encoder import NativeDiTLoadTextEncoder
from .load_vae import NativeDiTLoadVAE
from .negative_prompt import NativeDiTNegativePrompt
from .patch_guidance import NativeDiTPatchRenormalizedGuidance
from .quantize_model import NativeDiTQuantizeModel
from .sample import NativeDiTModelSampling, NativeDiTSample
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
    NativeDiTConvertCheckpoint,
    NativeDiTCompareModels,
    NativeDiTLoadVAE,
    NativeDiTNegativePrompt,
    NativeDiTSample,
    NativeDiTModelSampling,
    NativeDiTSizeConditions,
    NativeDiTAdaptiveProjectedGuidance,
    NativeDiTPatchRenormalizedGuidance,
    NativeDiTCalibrateModel,
]
