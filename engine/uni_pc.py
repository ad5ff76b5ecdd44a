"""The unified predictor and corrector, in several steps, with the clean latent as its prediction.

ComfyUI runs it on latents that are scaled so that their variance is kept, for flows too, and ends at a small sigma.
"""
# Source: UniPC (Zhao et al., arXiv 2302.04867), multistep, B1(h), data prediction. ComfyUI's parametrisation is
# x / sqrt(1 + sigma^2) with alpha = 1 / sqrt(1 + sigma^2); the end is at 0.001.

from __future__ import annotations

import torch

__all__ = ["uni_pc"]

LAST_SIGMA = 0.001


def _signal(sigma: torch.Tensor) -> torch.Tensor:
    """log(1 / sqrt(1 + sigma^2))."""
    return 0.5 * torch.log(1 / (sigma * sigma + 1))


def _deviation(sigma: torch.Tensor) -> torch.Tensor:
    """sigma / sqrt(1 + sigma^2). The detour costs digits at small sigmas, and is taken to land where ComfyUI lands."""
    return torch.sqrt(1.0 - torch.exp(2.0 * _signal(sigma)))


def _half_log_snr(sigma: torch.Tensor) -> torch.Tensor:
    return _signal(sigma) - 0.5 * torch.log(1.0 - torch.exp(2.0 * _signal(sigma)))


def uni_pc(model, x: torch.Tensor, sigmas: torch.Tensor, run) -> torch.Tensor:
    """See samplers. Order 3 as far as there are steps. A single step predicts nothing, here as in ComfyUI."""
    if len(sigmas) < 2:
        return x
    times = sigmas.clone()
    ends_at_zero = bool(times[-1] == 0)
    if ends_at_zero:
        times[-1] = LAST_SIGMA
    steps = len(times) - 1
    order = min(3, steps - 1)
    batch = x.new_ones(x.shape[0])

    def clean(scaled: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return model(scaled * (sigma**2 + 1.0) ** 0.5, sigma * batch)

    x = x / torch.sqrt(1.0 + times[0] ** 2)
    history = [(times[0], clean(x, times[0]))]
    run.on_step(0, history[-1][1])
    for step in range(1, steps + 1 if order else 1):
        at = min(order, steps + 1 - step) if step >= order else step
        x, denoised = _update(x, history, times[step], at, clean if step < steps else None)
        if denoised is not None:
            history = [*history, (times[step], denoised)][-order:]
            run.on_step(step, denoised)
    x = x / torch.exp(_signal(times[-1]))
    # ComfyUI writes the last sigma into the caller's schedule, and the flow then divides by 1 - sigma.
    return x / (1.0 - LAST_SIGMA) if ends_at_zero else x


def _update(x, history, sigma, order, clean):
    """One predictor step to ``sigma`` and, where ``clean`` can be asked there, the corrector. Returns x and x0."""
    last_sigma, last = history[-1]
    last_snr = _half_log_snr(last_sigma)
    h = _half_log_snr(sigma) - last_snr
    alpha = torch.exp(_signal(sigma))

    ratios, differences = [], []
    for other_sigma, other in reversed(history[-order:-1]):
        ratio = (_half_log_snr(other_sigma) - last_snr) / h
        ratios.append(ratio)
        differences.append((other - last) / ratio)
    ratios = torch.stack([*ratios, torch.ones_like(h)])

    rows, right = [], []
    phi, factorial = torch.expm1(-h) / -h - 1, 1
    for i in range(1, order + 1):
        rows.append(ratios ** (i - 1))
        right.append(phi * factorial / -h)
        factorial *= i + 1
        phi = phi / -h - 1 / factorial
    rows, right = torch.stack(rows), torch.stack(right)

    base = _deviation(sigma) / _deviation(last_sigma) * x - alpha * torch.expm1(-h) * last
    change = 0.0
    if differences:  # order 2 has the closed form 1/2
        weights = rows.new_tensor([0.5]) if order == 2 else torch.linalg.solve(rows[:-1, :-1], right[:-1])
        change = _weighted(weights, differences)
    predicted = base + alpha * h * change
    if clean is None:
        return predicted, None
    denoised = clean(predicted, sigma)
    weights = rows.new_tensor([0.5]) if order == 1 else torch.linalg.solve(rows, right)
    change = _weighted(weights, [*differences, denoised - last])
    return base + alpha * h * change, denoised


def _weighted(weights: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
