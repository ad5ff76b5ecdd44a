"""The fixed position table that Sana's 2K and 4K checkpoints add to their tokens."""

from __future__ import annotations

import torch


def position_table(
    size: tuple[int, int], dim: int, base_size: int, interpolation_scale: float, device: torch.device
) -> torch.Tensor:
    """Sines and cosines in float32: of the column in the first half of the channels, of the row in the second.

    Positions run over the same range whatever the size, so a larger picture has them closer together. For each axis the
    sines come first, then as many cosines.
    """
    # size (rows, columns) -> [rows * columns, dim]. Positions: 0 to base_size / interpolation_scale. Per axis dim / 4
    # sines, then cosines, of position / 10000 ** (4 i / dim).
    # Source: diffusers' get_2d_sincos_pos_embed 0.42.1, which computes the angles in float64.
    quarter = dim // 4
    frequencies = torch.tensor([10000.0 ** (-i / quarter) for i in range(quarter)], dtype=torch.float32, device=device)

    def axis(count: int) -> torch.Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=device) / (count / base_size) / interpolation_scale
        angles = positions[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    rows, columns = axis(size[0]), axis(size[1])
    columns = columns[None].expand(size[0], -1, -1)
    rows = rows[:, None].expand(-1, size[1], -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1)
