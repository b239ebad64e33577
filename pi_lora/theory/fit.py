"""A score fitted to noise inside the window: how it blows up beyond, and how calm it is in between (figure 2)."""

from dataclasses import dataclass

import numpy as np

from pi_lora.theory.bounds import Complexes, Reals, attention_score, frequencies


@dataclass(frozen=True)
class Fit:
    """A score through random `points` at the distances 0, 1, ... L - 1, as its coefficients `h`, [d / 2]."""

    points: Reals
    h: Complexes
    theta: float
    ridge: float

    def at(self, s: Reals) -> Reals:
        """The fitted score at the distances `s`."""
        return attention_score(self.h, s, self.theta)


def fit_noise(head_dim: int, theta: float, original: int, ridge: float = 0.0, seed: int = 0) -> Fit:
    """Fit a score to standard normal noise at every distance inside the window, as the paper's appendix C.1.

    Least squares in float64, through the singular values: the basis is so close to dependent (condition number 1e16 in
    the paper's setting) that how far a fit blows up is decided by rounding. `ridge` is what `ridge * sum_j |h_j|^2`
    adds to the sum of squares (the last remark of section 2.3).

    >>> calm, wild = fit_noise(16, 100.0, 64, ridge=1.0), fit_noise(16, 100.0, 64)
    >>> bool(np.abs(calm.h).max() < np.abs(wild.h).max())
    True
    """
    points = np.random.default_rng(seed).standard_normal(original)
    angles = np.outer(np.arange(original, dtype=np.float64), frequencies(head_dim, theta))
    left, sizes, right = np.linalg.svd(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), full_matrices=False)
    # What numpy.linalg.lstsq drops as well: a column that is another one but for rounding.
    kept = sizes > np.finfo(np.float64).eps * original * sizes[0]
    shrunk = np.divide(sizes, sizes**2 + ridge, out=np.zeros_like(sizes), where=kept)
    cosines, sines = np.split(right.T @ (shrunk * (left.T @ points)), 2)
    return Fit(points, np.asarray(cosines - 1j * sines, dtype=np.complex128), theta, ridge)
