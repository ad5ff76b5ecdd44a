"""ComfyUI nodes (V3 schema). Each is one call on the Host."""

from .empty_latent import NativeDiTEmptyLatent
from .load_diffusion_model import NativeDiTLoadDiffusionModel
from .load_text_encoder import NativeDiTLoadTextEncoder

NODES = [NativeDiTLoadDiffusionModel, NativeDiTLoadTextEncoder, NativeDiTEmptyLatent]
