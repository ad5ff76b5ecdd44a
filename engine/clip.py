"""CLIP: a text encoder with the habits of the diffusion model that reads its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..checkpoints.load import LoadedTextEncoder
from ..supported_models import Architecture
from ..text_encoders.prompt import instruction_ids, seen_positions, tokenize_prompt
from ..text_encoders.prompt_weights import apply_weights, embeddings_left_out, read_prompt, weighted_tokens
from .objects import Condition

__all__ = ["Clip"]


@dataclass(frozen=True)
class Clip:
    """Weights keep the file's dtype, the computation is float32, as ComfyUI does it for text encoders.

    note: is told what of a prompt could not be used.
    """

    encoder: LoadedTextEncoder
    architecture: Architecture
    device: torch.device
    note: Callable[[str], None]

    @torch.inference_mode()
    def encode(self, text: str, negative: bool = False) -> Condition:
        """States [1, L, D] float32 with their attention mask [1, L]; a prompt without tokens is one row of zeros,
        masked unless the card wants it seen. negative: before such prompts some models have no instruction."""
        tokens = self._tokens(text, negative)
        if not tokens:
            prompt = self.architecture.prompt
            width = self.encoder.model.config.hidden_size * len(prompt.layers)
            seen = torch.full((1, 1), int(prompt.empty == "zeros"))
            return torch.zeros(1, 1, width), {"attention_mask": seen}
        ids = torch.tensor([[token for token, _ in tokens]], device=self.device)
        weights = torch.tensor([weight for _, weight in tokens], device=self.device)
        states = self._states(ids)
        if (weights != 1.0).any():
            states = apply_weights(states, self._states(torch.full_like(ids, self.encoder.tokenizer.pad_id)), weights)
        instruction = instruction_ids(self.encoder.tokenizer, self.architecture.prompt)
        seen = seen_positions(instruction, [token for token, _ in tokens])
        states = states.float().cpu() if seen is None else states[:, seen].float().cpu()
        return states, {"attention_mask": torch.ones(states.shape[:2], dtype=torch.long)}

    def _tokens(self, text: str, negative: bool) -> list[tuple[int, float]]:
        tokenizer, prompt = self.encoder.tokenizer, self.architecture.prompt
        pieces, embeddings = read_prompt(text)
        if embeddings:
            self.note(embeddings_left_out(embeddings))
        if any(weight != 1.0 for _, weight in pieces):
            return weighted_tokens(tokenizer, prompt, pieces, negative)
        text = "".join(piece for piece, _ in pieces)
        return [(token, 1.0) for token in tokenize_prompt(tokenizer, prompt, text, negative)]

    def _states(self, ids: torch.Tensor) -> torch.Tensor:
        prompt = self.architecture.prompt
        _, states = self.encoder.model(
            ids, layers=prompt.layers, normed=prompt.normed, last=False, compute_dtype=torch.float32
        )
        return torch.cat(states, dim=-1)
