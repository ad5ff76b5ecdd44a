"""The model base that every card's model uses inside ComfyUI: what is ComfyUI's business, none of the maths."""

from __future__ import annotations

import comfy.conds
import comfy.model_base
import comfy.patcher_extension
import torch
import torch.nn.functional as F

from ..files.errors import FileError
from ..supported_models import Architecture
from .config import constructor_arguments
from .experts import with_banks
from .hooks import current_file
from .quantized import check_weights
from .sampling import keep_prediction, reference_timestep


class NativeDiTModel(comfy.model_base.BaseModel):
    """nativedit_file: the path its weights are from, whose name tells variants apart; None = unknown."""

    nativedit_file: str | None = None

    def __init__(self, model_config, device=None):
        super().__init__(
            model_config,
            model_type=comfy.model_base.ModelType.FLOW,
            device=device,
            unet_model=lambda **config: build(model_config.card, config),
        )
        self.diffusion_model.wrap_forward = run_wrapped

    @property
    def model_sampling(self):
        """Whatever ComfyUI's nodes put there, with our prediction (torch keeps modules beside the properties)."""
        current = self._modules["model_sampling"]
        keep_prediction(current, self.model_config.card.sampling)
        return current

    def process_timestep(self, timestep, **kwargs):
        return reference_timestep(timestep, self.model_sampling, self.model_config.card.sampling)

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        context = kwargs.get("cross_attn")
        if context is None:
            return out
        # Not ComfyUI's CONDCrossAttn: it repeats tokens to even out lengths, which changes a joint softmax.
        out["c_crossattn"] = comfy.conds.CONDRegular(context)
        mask = kwargs.get("attention_mask")
        # A mask that hides nothing is dropped: fast attention kernels take none.
        if mask is not None and not bool(mask.all()):
            joined = max(context.shape[1] - mask.shape[1], 0)  # Conditioning (Concat) adds tokens without a mask
            mask = F.pad(mask.to(torch.int64), (0, joined), value=1)[:, : context.shape[1]]
            out["attention_mask"] = comfy.conds.CONDRegular(mask)  # integers: ComfyUI turns booleans into floats
        scale = self.model_config.card.sampling.guidance
        if scale is not None:
            scale = kwargs.get("guidance", scale)  # ComfyUI's FluxGuidance node sets it
            told = scale * self.diffusion_model.guidance_embeds_scale
            out["guidance"] = comfy.conds.CONDRegular(torch.tensor([told], dtype=torch.float32))
        for name in self.model_config.card.conditions:
            if kwargs.get(name) is not None:
                out[name] = comfy.conds.CONDRegular(torch.tensor([kwargs[name]], dtype=torch.int64))
        return out

    def load_model_weights(self, sd, unet_prefix="", *args, **kwargs):
        self.nativedit_file = current_file()
        own = {key[len(unet_prefix) :]: value for key, value in sd.items() if key.startswith(unet_prefix)}
        check_weights(
            current_file() or f"this {self.model_config.card.title} model",
            expected_shapes(self.model_config.card, self.model_config.unet_config),
            self.model_config.process_unet_state_dict(own),
            self.diffusion_model.get_submodule,
        )
        return super().load_model_weights(sd, unet_prefix, *args, **kwargs)


def build(card: Architecture, config: dict) -> torch.nn.Module:
    """The card's module from ComfyUI's ``unet_config`` and the device, dtype and operations it adds."""
    factory = {key: config.get(key) for key in ("device", "dtype")}
    operations = config.get("operations") or torch.nn
    if card.quantization is not None and card.quantization.banks and operations is not torch.nn:
        operations = with_banks(operations)
    try:
        return card.module_class()(**constructor_arguments(card, config), **factory, operations=operations)
    except (TypeError, ValueError) as error:
        path = current_file() or f"this {card.title} model"
        raise FileError(path, f"its configuration does not fit {card.title}: {error}") from error


def expected_shapes(card: Architecture, config: dict) -> dict[str, tuple[int, ...]]:
    """Of a module without memory: the live one may have no weights yet."""
    module = build(card, {**config, "device": "meta", "dtype": None, "operations": None})
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def run_wrapped(inner, x, timesteps, context, attention_mask, transformer_options, **conditions):
    """``inner`` (a model's _forward) inside the wrappers that nodes have set, such as EasyCache.

    Positional as ComfyUI's own models pass them: wrappers look for x first and for the options among the last.
    """
    wrappers = comfy.patcher_extension.get_all_wrappers(
        comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, transformer_options
    )
    if wrappers:
        x = x.clone()  # EasyCache adds to it, and in float32 it is the sampler's own
    executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(inner, inner.__self__, wrappers)
    return executor.execute(x, timesteps, context, attention_mask, transformer_options, **conditions)
