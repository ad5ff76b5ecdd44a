"""What every diffusion transformer here has in common: a host's extension points, and nothing of the maths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint


class DiffusionTransformer(torch.nn.Module):
    """Base class: ``forward`` goes through the host's wrapper if there is one, ``_forward`` is the model.

    ``repeated_blocks`` names the classes that a host may compile, offload or shard one by one; ``context_width`` is
    that of the text states the model reads, None = not checked. ``in_channels`` and ``out_channels`` count a latent's
    channels, as nodes of ComfyUI expect them of a diffusion model.
    """

    repeated_blocks: tuple[str, ...] = ()
    context_width: int | None = None
    in_channels: int
    out_channels: int
    wrap_forward: Callable[..., torch.Tensor] | None = None
    gradient_checkpointing: bool = False

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype = dtype

    def enable_gradient_checkpointing(self, enabled: bool = True) -> None:
        self.gradient_checkpointing = enabled

    def forward(
        self, x, timesteps, context, attention_mask=None, control=None, transformer_options=None, **conditions
    ) -> torch.Tensor:
        """See the model's ``_forward`` for shapes; conditions are the model's own, by the reference's names.

        Raises ValueError for text states of another width than the model's.
        """
        if context is not None and self.context_width not in (None, context.shape[-1]):
            raise ValueError(
                f"the prompt is {context.shape[-1]} numbers wide, {type(self).__name__} reads {self.context_width}: it "
                "was encoded by another model's text encoder; load the one that belongs to the diffusion model"
            )
        options = {} if transformer_options is None else transformer_options
        if self.wrap_forward is None:
            return self._forward(x, timesteps, context, attention_mask, options, control=control, **conditions)
        return self.wrap_forward(
            self._forward, x, timesteps, context, attention_mask, options, control=control, **conditions
        )

    def _forward(self, x, timesteps, context, attention_mask, transformer_options, control=None, **conditions):
        raise TypeError(f"{type(self).__name__} does not define _forward")


class BlockLoop:
    """ComfyUI's per-block extension points during one pass over a list of blocks.

    It says in a copy of the options which block is running, lets a replacement take a block's place, runs the patches
    after it and adds the residuals of a control to the image tokens. Arguments and results of blocks travel under
    ComfyUI's names, so that patches written for core's models fit.
    """

    # Options: block_type, block_index, total_blocks, patches_replace["dit"][(kind_block, i)], patches[kind_block].
    # Residuals: "input" for double, "output" for single blocks. Names: img, txt, vec, pe, attn_mask.

    def __init__(self, kind: str, total: int, transformer_options: dict, control: dict | None, model=None):
        self.name = f"{kind}_block"
        self.options = {**transformer_options, "block_type": kind, "total_blocks": total}
        self.replace = transformer_options.get("patches_replace", {}).get("dit", {})
        self.patches = transformer_options.get("patches", {}).get(self.name, ())
        self.residuals = (control or {}).get("input" if kind == "double" else "output") or ()
        self.checkpointing = model is not None and model.gradient_checkpointing and torch.is_grad_enabled()

    def run(self, index: int, block: Callable[..., dict], args: dict) -> dict:
        """The block gets its inputs by name, and returns those that it changed."""
        # block(**args) -> {"img": ...} or {"img": ..., "txt": ...}
        self.options["block_index"] = index
        args = {**args, "transformer_options": self.options}

        def original(given: dict) -> dict:
            if self.checkpointing:
                return checkpoint(lambda: block(**given), use_reentrant=False)
            return block(**given)

        replacement = self.replace.get((self.name, index))
        out = original(args) if replacement is None else replacement(args, {"original_block": original})
        for patch in self.patches:
            out = {**out, **patch({**args, **out})}
        if index < len(self.residuals) and self.residuals[index] is not None:
            add = self.residuals[index].to(out["img"])
            head, tail = out["img"][:, : add.shape[1]], out["img"][:, add.shape[1] :]
            out = {**out, "img": torch.cat((head + add, tail), dim=1)}
        return out
