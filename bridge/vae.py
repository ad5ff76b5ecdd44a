"""Autoencoders that ComfyUI does not know, inside its own VAE object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch

from ..autoencoders import Autoencoder, AutoencoderMatch, find_autoencoder
from ..checkpoints.kinds import AUTOENCODER, UNKNOWN, kind_of, wrong_slot
from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..files.source import open_source
from ..latent_formats import get_latent_format
from ..supported_models import import_dotted
from .hooks import current_file, guarded, loading, log, wrap_once
from .quantized import check_weights, unknown_format

# By this entry ComfyUI makes its pixel "autoencoder": every attribute that its version has, and almost no weights.
SHELL = "pixel_space_vae"
# ComfyUI's own numbers for FLUX.1's autoencoder: bytes per pixel, byte of dtype and channel of the widest tensor.
ENCODE_FACTOR, DECODE_FACTOR = 1767 / 128, 2178 / 256


# By which ComfyUI's own loader offers the pixel "autoencoder".
PIXEL_SPACE = "pixel_space"


def load_vae(path: str | None, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """ComfyUI's VAE of a file, ours or core's; path None: the pixel one. Raises FileError that says what the file is
    instead."""
    if path is None:
        return comfy.sd.VAE(sd={SHELL: torch.tensor(1.0)}, device=device, dtype=dtype)
    if path.endswith((".safetensors", ".sft")):
        with open_source(path) as source:
            kind = kind_of(source.shapes())
        if kind not in (AUTOENCODER, UNKNOWN):  # ComfyUI knows more autoencoders than we can name
            raise FileError(path, wrong_slot(kind, AUTOENCODER))
    state_dict, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    with loading(path):
        vae = comfy.sd.VAE(sd=state_dict, device=device, dtype=dtype, metadata=metadata)
    vae.throw_exception_if_invalid()
    vae.patcher.cached_patcher_init = (_load_patcher, (path, dtype, device))
    return vae


def _load_patcher(path: str, dtype: torch.dtype | None, device: Any, disable_dynamic: bool = False) -> Any:
    """For nodes of ComfyUI that put a copy on another device; the last argument has no effect on a VAE."""
    return load_vae(path, dtype, device).patcher


def install() -> None:
    # On the class, because other modules hold it by name and ask isinstance.
    wrap_once(comfy.sd.VAE, "__init__", _init)


def _init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """VAE.__init__(sd=None, device=None, config=None, dtype=None, metadata=None) of ComfyUI."""
    named = dict(zip(("sd", "device", "config", "dtype", "metadata"), args, strict=False)) | kwargs
    found = None
    with guarded("the look at this autoencoder"):
        found = claim(named.get("sd"), named.get("config"))
    if found is None:
        original(self, *args, **kwargs)
        return
    shell = {SHELL: torch.tensor(1.0)}
    if args:
        original(self, shell, *args[1:], **kwargs)
    else:
        original(self, **{**kwargs, "sd": shell})
    fill(self, found, named["sd"], named.get("dtype"))


def claim(state_dict: Mapping[str, torch.Tensor] | None, config: Any = None) -> AutoencoderMatch | None:
    """The kind of an autoencoder that ComfyUI has no module for; None for its own and for anything else."""
    if not state_dict or config is not None:
        return None
    found = find_autoencoder({key: tuple(value.shape) for key, value in state_dict.items()})
    if found is None or get_latent_format(found.autoencoder.latent_format).core is not None:
        return None
    log.info("NativeDiT: loads this %s", found.autoencoder.title)
    return found


def fill(vae: Any, found: AutoencoderMatch, state_dict: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Turn ComfyUI's pixel VAE into this one. Raises FileError for missing, unknown or misshapen weights."""
    kind = found.autoencoder
    path = current_file() or f"this {kind.title}"
    problem = unknown_format(state_dict)
    if problem is not None:
        raise FileError(path, problem)
    cls = import_dotted(kind.module)
    empty = cls(**found.config, device="meta", operations=torch.nn)
    expected = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
    weights = {}
    for key, value in state_dict.items():
        weights.update(found.place(key, value, expected))
    check_weights(path, expected, weights)
    _describe(vae, kind, found.config)
    management = comfy.model_management
    vae.vae_dtype = dtype or management.vae_dtype(vae.device, vae.working_dtypes)
    module = cls(**found.config, device=None, dtype=None, operations=comfy.ops.disable_weight_init)
    vae.first_stage_model = module.requires_grad_(False).train(False).to(vae.vae_dtype)
    if hasattr(management, "archive_model_dtypes"):  # absent in 0.8
        management.archive_model_dtypes(vae.first_stage_model)
    # 0.8 has the plain one alone; in later versions this is the dynamic one where that runs.
    patcher = vars(comfy.model_patcher).get("CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    vae.patcher = patcher(vae.first_stage_model, load_device=vae.device, offload_device=management.vae_offload_device())
    assign = {"assign": True} if hasattr(vae.patcher, "is_dynamic") and vae.patcher.is_dynamic() else {}
    vae.first_stage_model.load_state_dict(weights, strict=False, **assign)
    vae.size = None
    vae.model_size()
    vae.__class__ = CheckedVAE  # isinstance holds, and a shallow copy on another device keeps it


class CheckedVAE(comfy.sd.VAE):
    """ComfyUI's VAE, which says what is wrong with tiles that would give NaN, a division by zero or a torch error."""

    def encode_tiled(self, pixel_samples, tile_x=None, tile_y=None, overlap=None, *args, **kwargs):
        check_tiles(self.downscale_ratio, (tile_x or 512, tile_y or 512), 64 if overlap is None else overlap)
        return super().encode_tiled(pixel_samples, tile_x, tile_y, overlap, *args, **kwargs)


def check_tiles(compression: int, tile: tuple[int, int], overlap: int) -> None:
    """ComfyUI encodes in tiles of tile x tile, twice as wide and twice as high ones, whose sides and steps have to be
    whole latent pixels. tile, overlap: in picture pixels. Raises ValueError."""
    shortest = min(tile) // 2
    whole = all(side % (2 * compression) == 0 for side in tile) and overlap % compression == 0
    if whole and overlap < shortest:
        return
    raise ValueError(
        f"this autoencoder can't encode in tiles of {tile[0]}x{tile[1]} pixels that overlap by {overlap}: tiles must "
        f"be multiples of {2 * compression}, the overlap a multiple of {compression} and less than half a tile; "
        f"{max(8 * compression, 512)} and {2 * compression} are right"
    )


def _describe(vae: Any, kind: Autoencoder, config: Mapping[str, Any]) -> None:
    vae.downscale_ratio = vae.upscale_ratio = kind.compression
    vae.latent_channels, vae.latent_dim, vae.output_channels = kind.latent_channels, 2, 3
    vae.working_dtypes = [parse_dtype(dtype) for dtype in kind.dtypes]
    vae.disable_offload = False  # the shell's weights are nothing worth offloading, these are
    encoder = config.get("encoder_block_out_channels") or config["block_out_channels"]
    decoder = config.get("decoder_block_out_channels") or config["block_out_channels"]
    encode = ENCODE_FACTOR * widest(encoder)
    decode = DECODE_FACTOR * widest(decoder[1:])  # a level first works on what comes up from the one below
    pixels_per_latent = kind.compression**2
    size_of = comfy.model_management.dtype_size
    vae.memory_used_encode = lambda shape, dtype: encode * shape[2] * shape[3] * size_of(dtype)
    vae.memory_used_decode = lambda shape, dtype: decode * shape[2] * shape[3] * pixels_per_latent * size_of(dtype)


def widest(widths: Sequence[int]) -> float:
    """Channels of the largest tensor, counted at full resolution; every level halves it each way."""
    return max(width / 4**level for level, width in enumerate(widths))
