"""The quantile function of the beta distribution, for the schedule of that name, without scipy."""
# Facts: the continued fraction of the incomplete beta function, NIST Digital Library of Mathematical Functions 8.17.22.

from __future__ import annotations

import functools
import math

__all__ = ["beta_quantile"]


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Value of 1/(1+ d1/(1+ d2/(1+ ...))) by Lentz's method."""
    tiny, value, c, d = 1e-300, 1.0, 1.0, 0.0
    for step in range(400):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / ((1.0 + term * d) or tiny)
        c = (1.0 + term / c) or tiny
        value *= c * d
        if step and abs(c * d - 1.0) < 1e-15:
            break
    return value - 1.0


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, for x from zero to one."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below that
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) * _continued_fraction(x, a, b) / a


@functools.cache
def beta_quantile(p: float, a: float, b: float) -> float:
    """x with I_x(a, b) = p, by bisection to the last digit of a double."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if beta_cdf(middle, a, b) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2
