"""ComfyUI's side: registers our architectures with ComfyUI's own model detection and hands it our nodes."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def extension(nodes: list[type]) -> Any:
    """Installs everything (once per process) and returns ComfyUI's extension object with ``nodes``.

    A second copy of the pack, in another folder, registers nothing and says so.
    """
    import comfy.model_detection
    from comfy_api.latest import ComfyExtension

    from .hooks import PACK, claim_process

    other = claim_process(comfy.model_detection)
    if other is not None:
        log.warning("NativeDiT is installed twice: %s is in use, %s is ignored; remove one of them", other, PACK)
    else:
        _install()

    class NativeDiT(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return [] if other is not None else list(nodes)

    return NativeDiT()


def _install() -> None:
    from ..host import set_host
    from ..ldm.layers.attention import set_backend
    from .hooks import guarded

    with guarded("ComfyUI's attention in NativeDiT's models"):
        from .attention import comfyui_attention

        set_backend(comfyui_attention)
    with guarded("loading diffusion models"):
        from . import detection

        detection.install()
    with guarded("text encoders in ComfyUI's own loaders"):
        from . import text_encoders

        text_encoders.install()
    with guarded("autoencoders in ComfyUI's own loaders"):
        from . import vae

        vae.install()
    with guarded("LoRA names"):
        from . import lora

        lora.install()
    with guarded("the shift by the latent's size"):
        from . import sample

        sample.install()
    with guarded("the publishers' schedules"):
        from . import schedules

        schedules.install()
    with guarded("the settings of cached samplers"):
        from . import kept_settings

        kept_settings.install()
    with guarded("the demo model"):
        from . import folders

        folders.install()
    from .host import ComfyUIHost

    set_host(ComfyUIHost())
