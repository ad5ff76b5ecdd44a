"""What ComfyUI calls a CLIP, made of our language models and tokenizers: the two classes its CLIP object asks for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.ops
import torch

from ..files.errors import FileError
from ..supported_models import import_dotted
from ..text_encoders.families import TextEncoder, find_text_encoder, module_keys
from ..text_encoders.prompt import Prompt, seen_positions, tokenize_prompt
from ..text_encoders.prompt_weights import apply_weights, embeddings_left_out, read_prompt, weighted_tokens
from ..text_encoders.tokenizer import Tokenizer
from .hooks import log
from .quantized import check_weights


class PromptTokenizer:
    """ComfyUI's tokenizer contract on one of our tokenizers and a card's prompt habits.

    extra: tensors that ComfyUI's save nodes shall write beside the weights.
    """

    def __init__(
        self,
        embedding_directory=None,
        tokenizer_data=None,
        *,
        name: str,
        tokenizer: Tokenizer,
        prompt: Prompt,
        extra: dict[str, torch.Tensor],
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.extra = extra

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        disable_weights: bool = False,
        negative: bool = False,
        **_,
    ):
        """{name: [[(id, weight) or (id, weight, word)]]}; one row, empty where the tokenizer makes nothing of "".

        negative: a negative prompt, before which some models have no instruction."""
        pieces, embeddings = read_prompt(text, weights=not disable_weights)
        if embeddings:
            log.warning("NativeDiT: %s", embeddings_left_out(embeddings))
        if all(weight == 1.0 for _, weight in pieces):
            plain = "".join(piece for piece, _ in pieces)
            row = [(token, 1.0) for token in tokenize_prompt(self.tokenizer, self.prompt, plain, negative)]
        else:
            row = weighted_tokens(self.tokenizer, self.prompt, pieces, negative)
        if return_word_ids:
            row = [(token, weight, word) for word, (token, weight) in enumerate(row, start=1)]
        return {self.name: [row]}

    def untokenize(self, token_weight_pair):
        return [(pair, self.tokenizer.decode([pair[0]], skip_special_tokens=False)) for pair in token_weight_pair]

    def decode(self, token_ids, skip_special_tokens=True, **_) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**self.tokenizer.state_tensors(), **self.extra}


class _Holder(torch.nn.Module):
    """A name and nothing more: the weights lie two such names deep, where ComfyUI's LoRA code looks for them."""

    # The keys are FAMILY.transformer.model.KEY.


class TextEncoderModel(torch.nn.Module):
    """ComfyUI's text model contract: weights stay in the dtype they are stored in, the computation is float32.

    ComfyUI builds it with the first three arguments; our own follow by keyword.
    """

    def __init__(
        self,
        device="cpu",
        dtype=None,
        model_options=None,
        *,
        family: TextEncoder,
        config: dict[str, Any],
        prompt: Prompt,
        # Of the weights in memory, unless `model_options` name one: ComfyUI's default squeezes bfloat16 into float16.
        storage_dtype: torch.dtype,
        pad_id: int,
        path: str,  # for messages
        quantized: bool = False,
        instruction: Sequence[int] = (),  # ids of what the model's instruction begins with, see Prompt
    ):
        super().__init__()
        options = model_options or {}
        dtype = options.get("dtype") or storage_dtype
        self.family, self.config, self.prompt, self.pad_id, self.path = family, dict(config), prompt, pad_id, path
        self.instruction = tuple(instruction)
        self.dtypes = {dtype}
        self.prefix = f"{family.name}.transformer.model."
        holder = _Holder()
        holder.transformer = _Holder()
        holder.transformer.model = self._build(device, dtype, _operations(options, dtype, quantized))
        setattr(self, family.name, holder)
        self.reset_clip_options()

    def _build(self, device, dtype, operations) -> torch.nn.Module:
        try:
            return import_dotted(self.family.module)(**self.config, device=device, dtype=dtype, operations=operations)
        except (TypeError, ValueError) as error:
            problem = f"its configuration does not fit a {self.family.title}: {error}"
            raise FileError(self.path, problem) from error

    @property
    def language_model(self) -> torch.nn.Module:
        return self.get_submodule(self.prefix.removesuffix("."))

    def set_clip_options(self, options: dict[str, Any]) -> None:
        self.layer = options.get("layer", self.layer)
        self.execution_device = options.get("execution_device", self.execution_device)

    def reset_clip_options(self) -> None:
        self.layer, self.execution_device = None, None

    def encode_token_weights(self, token_weight_pairs):
        """(states [1, L, C] float32, None, {"attention_mask": [1, L] int64}); rows of tokens are set one after another.

        A prompt without any token is one row of zeros, which the mask hides unless the card wants it seen.
        """
        encoded = [self._encode_row(row) for row in token_weight_pairs[self.family.name]]
        states = torch.cat([row for row, _ in encoded], dim=1)
        mask = torch.cat([row for _, row in encoded], dim=1)
        device = comfy.model_management.intermediate_device()
        return states.to(device), None, {"attention_mask": mask.to(device)}

    def _encode_row(self, row) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.execution_device or next(self.parameters()).device
        if not row:
            width = self.config["hidden_size"] * len(self._layers())
            seen = torch.full((1, 1), int(self.prompt.empty == "zeros"), device=device)
            return torch.zeros(1, 1, width, dtype=torch.float32, device=device), seen
        ids, weights = [entry[0] for entry in row], [float(entry[1]) for entry in row]
        states = self._states(torch.tensor([ids], device=device))
        if any(weight != 1.0 for weight in weights):
            neutral = self._states(torch.full_like(torch.tensor([ids], device=device), self.pad_id))
            states = apply_weights(states, neutral, torch.tensor(weights, device=device))
        seen = seen_positions(self.instruction, ids)
        states = states if seen is None else states[:, seen]
        return states, torch.ones(states.shape[:2], dtype=torch.int64, device=device)

    def _layers(self) -> tuple[int, ...]:
        return self.prompt.layers if self.layer is None else (self.layer,)

    def _states(self, ids: torch.Tensor) -> torch.Tensor:
        _, states = self.language_model(
            ids, layers=self._layers(), normed=self.prompt.normed, last=False, compute_dtype=torch.float32
        )
        return torch.cat(states, dim=-1)

    def memory_estimation_function(self, token_weight_pairs, device=None) -> int:
        """Bytes of activations: a layer's widest tensors and the scores, in float32."""
        rows = token_weight_pairs.get(self.family.name, [])
        tokens = max((len(row) for row in rows), default=0)
        width = 8 * self.config["hidden_size"] + 3 * self.config["intermediate_size"]
        return 4 * tokens * (width + 2 * self.config["num_attention_heads"] * tokens)

    def generate(self, *_, **__):
        raise ValueError(f"{self.path}: this text encoder reads prompts, it can't write text; it has no output head")

    def load_sd(self, sd):
        """ComfyUI's way for a text encoder's own file; keys as in the file."""
        return self.load_state_dict(sd, strict=False, assign=getattr(self, "can_assign_sd", False))

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Also ComfyUI's way for an all-in-one file. Keys with any prefix that text encoders come with.

        Raises FileError for missing, unknown or misshapen weights; ComfyUI would go on with uninitialised memory.
        """
        weights = own_names(state_dict, self.family)
        check_weights(self.path, self._expected_shapes(), weights, self.language_model.get_submodule)
        named = {self.prefix + key: value for key, value in weights.items()}
        return super().load_state_dict(named, strict=strict, assign=assign)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        module = self._build("meta", None, torch.nn)
        return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def own_names(state_dict, family: TextEncoder) -> dict[str, Any]:
    """{key in the bare layout: tensor} of the language model in a state dict with any known prefix."""
    shapes = {key: tuple(value.shape) for key, value in state_dict.items()}
    prefixes = [prefix for found, prefix, _ in find_text_encoder(shapes) if found.name == family.name]
    if not prefixes:  # a header or a card has said what it is; the embedding tells where it starts
        prefixes = [key.removesuffix("embed_tokens.weight") for key in shapes if key.endswith("embed_tokens.weight")]
    names = module_keys(state_dict, prefixes[0] if prefixes else "")
    return {name: state_dict[key] for key, name in names.items()}


def _operations(model_options: dict[str, Any], dtype: torch.dtype, quantized: bool):
    custom = model_options.get("custom_operations")
    if custom is not None:
        return custom
    if quantized:
        arguments = {"full_precision_mm": True}
        if "disabled" in inspect.signature(comfy.ops.mixed_precision_ops).parameters:
            arguments["disabled"] = []
        return comfy.ops.mixed_precision_ops({"mixed_ops": True}, dtype, **arguments)
    return comfy.ops.manual_cast
