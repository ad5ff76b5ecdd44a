"""A picture in overlapping tiles, so that memory stays bounded; neighbours are faded into each other."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run_in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    tile: int,
    stride: int,
    blend: int,
    keep: int,
) -> torch.Tensor:
    """``run`` over tiles of x [B, C, H, W], put together again.

    tile, stride: size of a tile and distance between two, in pixels of x; keep, blend: pixels of the result that each
    tile contributes, and over how many it is faded into the tile above and left of it. The scheme is diffusers'; what
    fits into one tile is not cut.
    """
    if max(x.shape[-2:]) <= tile:
        return run(x)
    rows, above = [], []
    for top in range(0, x.shape[-2], stride):
        row = [run(x[..., top : top + tile, left : left + tile]).clone() for left in range(0, x.shape[-1], stride)]
        for column, current in enumerate(row):
            if above:
                _fade(above[column], current, -2, blend)
            if column:
                _fade(row[column - 1], current, -1, blend)
        rows.append(torch.cat([current[..., :keep, :keep] for current in row], dim=-1))
        above = row
    return torch.cat(rows, dim=-2)


def _fade(before: torch.Tensor, after: torch.Tensor, dim: int, blend: int) -> None:
    """Replace the first rows (or columns) of ``after`` by a ramp from the last ones of ``before``."""
    blend = min(before.shape[dim], after.shape[dim], blend)
    if blend == 0:
        return
    ramp = torch.arange(blend, dtype=torch.float32, device=after.device) / blend
    ramp = (ramp[:, None] if dim == -2 else ramp).to(after.dtype)
    end, start = before.narrow(dim, before.shape[dim] - blend, blend), after.narrow(dim, 0, blend)
    start.copy_(end * (1 - ramp) + start * ramp)


def tile_sizes(tile: int, overlap: float, compression: int) -> tuple[int, int, int]:
    """(tile, stride, blend) in latent pixels, for a tile of so many picture pixels overlapping by a fraction.

    Raises ValueError when the tile holds no latent pixel or the overlap is outside 0..0.5.
    """
    latent_tile = tile // compression
    if not 0 <= overlap <= 0.5:
        raise ValueError(f"tiles overlap by {overlap:g} of their size; it must be between 0 and 0.5")
    blend = int(latent_tile * overlap)
    if latent_tile - blend < 1:
        raise ValueError(f"a tile of {tile} pixels is smaller than one latent pixel ({compression} pixels); use more")
    return latent_tile, latent_tile - blend, blend
