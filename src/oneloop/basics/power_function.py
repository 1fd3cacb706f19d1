"""Power-function averages of the weights: their exponents, and post-hoc mixing (Karras et al. 2024, section 3)."""

from __future__ import annotations

from typing import Any


def gamma(sigma_rel: float) -> float:
    """Exponent of the power-function average with this relative standard deviation (Karras et al. 2024, algorithm 2).

    Raises:
        ValueError: no power function is that wide.
    """
    import numpy as np

    widest = 12**-0.5
    if not 0 < sigma_rel < widest:
        raise ValueError(f"ema.power {sigma_rel} must be above 0 and below {widest:.3f}; 0.05 to 0.15 is usual")
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def post_hoc(saved: list[tuple[float, float]], wanted: tuple[float, float]) -> list[float]:
    """How to mix saved power-function averages into one that was not kept (Karras et al. 2024, algorithm 3).

    Args:
        saved: (what was seen, sigma_rel) of each.
        wanted: the same of the average to make.

    Returns:
        A factor for each; the mix is the least-squares best.
    """
    import numpy as np

    def inner(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
        ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
        return (gamma_a + 1) * (gamma_b + 1) * ratio / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))

    t = np.array([seen for seen, _ in saved])[:, None]
    g = np.array([gamma(sigma_rel) for _, sigma_rel in saved])[:, None]
    factors = np.linalg.solve(inner(t, g, t.T, g.T), inner(t, g, wanted[0], gamma(wanted[1])))
    return [float(factor) for factor in factors[:, 0]]
