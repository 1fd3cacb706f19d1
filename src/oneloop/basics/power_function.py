"""Power-function averages of the weights: their exponents, and post-hoc mixing (Karras et al. 2024, section 3)."""

from typing import Any


def gamma(sigma_rel: float) -> float:
    """Return the exponent of the power-function average of this relative standard deviation (Karras et al. 2024,
    algorithm 2). Raises ValueError if none is that wide."""
    import numpy as np

    widest = 12**-0.5
    if not 0 < sigma_rel < widest:
        raise ValueError(f"ema.power {sigma_rel} must be above 0 and below {widest:.3f}; 0.05 to 0.15 is usual")
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def post_hoc(saved: list[tuple[float, float]], wanted: tuple[float, float]) -> list[float]:
    """Return the least-squares factors that combine saved power-function averages into one that was not kept (Karras et
    al. 2024, algorithm 3). An average is a pair: samples seen, sigma_rel."""
    import numpy as np

    def inner(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
        ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
        return (gamma_a + 1) * (gamma_b + 1) * ratio / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))

    t = np.array([seen for seen, _ in saved])[:, None]
    g = np.array([gamma(sigma_rel) for _, sigma_rel in saved])[:, None]
    factors = np.linalg.solve(inner(t, g, t.T, g.T), inner(t, g, wanted[0], gamma(wanted[1])))
    return [float(factor) for factor in factors[:, 0]]
