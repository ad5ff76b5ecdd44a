"""What a node may ask of the program it runs in: ComfyUI (``bridge``) or the embedded engine (``engine``).

Objects that travel between nodes (MODEL, CLIP, LATENT, ...) are the host's own; nodes pass them on and never look
inside. A node's ``execute`` is one call on the host, so every node is written once and runs in both.
"""

from __future__ import annotations

from typing import Any, Protocol

AUTO = "auto"
AS_STORED = "as stored"


class Host(Protocol):
    """All methods raise exceptions whose message says what to do; a node adds nothing to them."""

    name: str

    def list_files(self, folder: str) -> list[str]:
        """Names (relative, as the host shows them) of the files in a models folder: "diffusion_models",
        "text_encoders", "vae", "loras"."""

    def load_diffusion_model(self, file: str, *, architecture: str = AUTO, precision: str = AS_STORED) -> Any:
        """A MODEL. architecture: a card's name or "auto"; precision: "as stored" or a dtype's name."""

    def load_text_encoder(self, file: str, *, architecture: str = AUTO, precision: str = AS_STORED) -> Any:
        """A CLIP that encodes prompts the way ``architecture`` was trained with."""

    def empty_latent(self, model: Any, *, width: int, height: int, batch_size: int) -> dict[str, Any]:
        """A LATENT of zeros, with the channels and the compression of ``model``. width, height: in pixels of the
        finished picture, 0 = the model's own default. Raises ValueError on a size the model's patches don't divide."""


_current: Host | None = None


def set_host(host: Host | None) -> None:
    """Called by the host itself when it starts (ComfyUI's side: once; the engine: for every run)."""
    global _current
    _current = host


def current_host() -> Host:
    """The running host. Raises RuntimeError when a node is called outside of one."""
    if _current is None:
        raise RuntimeError("no host: NativeDiT's nodes run inside ComfyUI or through `nativedit run`")
    return _current
