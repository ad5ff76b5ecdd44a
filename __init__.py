"""NativeDiT: diffusion transformers that ComfyUI's core lacks, comfy_quant checkpoints, headless graphs.

This file is both doors: ComfyUI imports it as a custom node pack, under a name made from its path, and calls its entry
point; everyone else imports it by its own name. Importing it loads nothing: the public names below are resolved on
first use.
"""

from importlib import import_module

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"

_PUBLIC = {
    "architectures": ".api",
    "inspect": ".api",
    "load_diffusion_model": ".api",
    "load_text_encoder": ".api",
    "load_autoencoder": ".api",
    "quantize": ".api",
    "dequantize": ".api",
    "repair": ".api",
    "convert": ".api",
    "resolve": ".api",
    "run": ".engine",
}

__all__ = ["WEB_DIRECTORY", "__version__", "comfy_entrypoint", *_PUBLIC]


def __getattr__(name):
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return vars(import_module(module, __name__))[name]


def __dir__():
    return sorted({*globals(), *_PUBLIC})


async def comfy_entrypoint():
    """Called once by ComfyUI: registers the architectures and hands over the nodes."""
    from .bridge import extension
    from .nodes import NODES

    return extension(NODES)
