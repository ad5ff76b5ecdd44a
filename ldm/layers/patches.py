"""Image to patch tokens and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pad_to_patch_size(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Grow the last two dimensions of [B, C, H, W] to multiples of the patch size, repeating the edge."""
    rows, columns = -x.shape[-2] % patch_size, -x.shape[-1] % patch_size
    if rows == 0 and columns == 0:
        return x
    return F.pad(x, (0, columns, 0, rows), mode="replicate")


def patchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """[B, C, H, W] -> [B, H/p * W/p, C * p * p]: tokens row by row, channels slowest inside a token."""
    b, c, h, w = x.shape
    p = patch_size
    return x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)


def unpatchify(tokens: torch.Tensor, patch_size: int, height: int, width: int) -> torch.Tensor:
    """Inverse of ``patchify``; height and width are the padded size in pixels (or latent pixels)."""
    b, p = tokens.shape[0], patch_size
    grid = tokens.reshape(b, height // p, width // p, -1, p, p)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, -1, height, width)
