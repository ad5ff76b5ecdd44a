"""CLIP: a text encoder with the habits of the diffusion model that reads its states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoints.load import LoadedTextEncoder
from ..supported_models import Architecture
from ..text_encoders.prompt import tokenize_prompt
from .objects import Condition

__all__ = ["Clip"]


@dataclass(frozen=True)
class Clip:
    """Weights keep the file's dtype, the computation is float32, as ComfyUI does it for text encoders."""

    encoder: LoadedTextEncoder
    architecture: Architecture
    device: torch.device

    @torch.inference_mode()
    def encode(self, text: str) -> Condition:
        """States [1, L, D] float32 with their attention mask [1, L]; a prompt without tokens is one masked row."""
        ids = tokenize_prompt(self.encoder.tokenizer, self.architecture.prompt, text)
        tokens = torch.tensor([ids or [0]], dtype=torch.long, device=self.device)
        mask = torch.full(tokens.shape, bool(ids), dtype=torch.long, device=self.device)
        _, states = self.encoder.model(
            tokens, mask, layers=self.architecture.prompt.layers, compute_dtype=torch.float32
        )
        return torch.cat(states, dim=-1).float().cpu(), {"attention_mask": mask.cpu(), "pooled_output": None}
