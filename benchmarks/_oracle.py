"""Coordinate ascent in plain numpy for Gaussian emissions: what the fits of `pyro_cvi` should be.

Component k has a precision P_k ~ Wishart(nu0, S0^-1) and a mean mu_k | P_k ~ N(m0, (beta0 P_k)^-1). Rows
x fall into G groups of d columns, independent of each other given the component. G = 1 is a full
covariance, d = 1 a diagonal one: tau ~ Gamma(nu0 / 2, S0 / 2) is the Wishart of one dimension.

There are two posteriors. *Factorised*, q(mu) q(P), is that of `pyro_cvi`. *Joint*, q(mu | P) q(P), is
that of scikit-learn and hmmlearn, and has the higher bound. At their optimum for given
responsibilities both have the same means, and the same E P: with nu = nu0 + n and S of the joint one,
the factorised one has nu + 1 and S + (E P)^-1, whence E P = nu S^-1 in both. They differ in E log |P|
alone, by about 1 / nu^2 for each dimension, and so do the responsibilities they give.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, gammaln

Array = NDArray[np.float64]

LOG_2PI = float(np.log(2 * np.pi))


class Dirichlets:
    """Rows of probabilities with a common Dirichlet prior."""

    def __init__(self, prior: Array, concentration: Array) -> None:
        self.prior, self.concentration = prior, concentration

    def update(self, counts: Array) -> None:
        self.concentration = self.prior + counts

    @property
    def mean(self) -> Array:
        return self.concentration / self.concentration.sum(-1, keepdims=True)

    @property
    def log_mean(self) -> Array:
        """E log of the probabilities."""
        c = self.concentration
        return digamma(c) - digamma(c.sum(-1, keepdims=True))

    @property
    def kl(self) -> float:
        """From posterior to prior, all rows."""
        p, q = np.broadcast_to(self.prior, self.concentration.shape), self.concentration
        return float(
            (gammaln(q.sum(-1)) - gammaln(p.sum(-1))).sum()
            - (gammaln(q) - gammaln(p)).sum()
            + ((q - p) * self.log_mean).sum()
        )


class Emissions:
    """Belief about means and precisions of K components.

    Shapes: m0 (G, d), S0 (G, d, d); loc (K, G, d), cov (K, G, d, d), nu (K,), S (K, G, d, d). `cov` and
    `beta` are used by one of the two posteriors each.
    """

    def __init__(
        self, m0: Array, beta0: float, nu0: float, S0: Array, components: int, joint: bool = False
    ) -> None:
        self.m0, self.beta0, self.nu0, self.S0, self.joint = m0, beta0, nu0, S0, joint
        shape = (components, *m0.shape)
        self.loc = np.broadcast_to(m0, shape).copy()
        self.cov = np.zeros((*shape, m0.shape[-1]))
        self.beta = np.full(components, beta0)
        self.nu = np.full(components, nu0)
        self.S = np.broadcast_to(S0, (components, *S0.shape)).copy()

    @property
    def d(self) -> int:
        return self.m0.shape[-1]

    @property
    def precision(self) -> Array:
        """E P."""
        result: Array = self.nu[:, None, None, None] * np.linalg.inv(self.S)
        return result

    @property
    def log_det(self) -> Array:
        """E log |P|, (K, G)."""
        parts = digamma((self.nu[:, None] - np.arange(self.d)) / 2).sum(-1)
        result: Array = parts[:, None] + self.d * np.log(2) - np.linalg.slogdet(self.S)[1]
        return result

    def see(self, x: Array, r: Array) -> None:
        """Count, sum and centred squares of the rows x (N, G, d) with responsibilities r (N, K)."""
        self.n = r.sum(0)
        self.sum = np.einsum("nk,ngd->kgd", r, x, optimize=True)
        self.centre = self.sum / np.maximum(self.n, 1e-300)[:, None, None]
        self.squares = np.empty_like(self.S)
        for k in range(len(self.n)):
            c = x - self.centre[k]
            self.squares[k] = np.einsum("ngd,nge->gde", r[:, k, None, None] * c, c, optimize=True)

    def update_mean(self) -> None:
        """q(mu) given E P."""
        self.beta = self.beta0 + self.n
        self.loc = (self.beta0 * self.m0 + self.sum) / self.beta[:, None, None]
        self.cov = np.linalg.inv(self.beta[:, None, None, None] * self.precision)

    def update_precision(self) -> None:
        """q(P) given q(mu); of the joint posterior, given that q(mu | P) is up to date."""
        n = self.n[:, None, None, None]
        apart = self.centre - self.loc
        from_prior = self.loc - self.m0
        self.S = self.S0 + self.squares + n * _outer(apart) + self.beta0 * _outer(from_prior)
        self.nu = self.nu0 + self.n
        if not self.joint:
            self.S = self.S + (n + self.beta0) * self.cov
            self.nu = self.nu + 1

    def log_likelihood(self, x: Array) -> Array:
        """E log N(x | mu_k, P_k^-1), (N, K)."""
        P, log_det = self.precision, self.log_det
        spread = (self.d / self.beta)[:, None] if self.joint else _trace(P, self.cov)
        result = np.empty((len(x), len(self.nu)))
        for k in range(len(self.nu)):
            c = x - self.loc[k]
            square = np.einsum("ngd,gde,nge->n", c, P[k], c, optimize=True)
            constant = (log_det[k] - self.d * LOG_2PI - spread[k]).sum()
            result[:, k] = 0.5 * (constant - square)
        return result

    @property
    def kl(self) -> float:
        """From posterior to prior."""
        P, log_det, d, c = self.precision, self.log_det, self.d, self.loc - self.m0
        square = self.beta0 * np.einsum("kgd,kgde,kge->kg", c, P, c)
        if self.joint:
            ratio = (self.beta0 / self.beta)[:, None]
            normal = 0.5 * (d * (ratio - 1 - np.log(ratio)) + square)
        else:
            expected = d * np.log(self.beta0) + log_det - square - self.beta0 * _trace(P, self.cov)
            normal = -0.5 * (expected + d + np.linalg.slogdet(self.cov)[1])
        nu = self.nu[:, None]
        wishart = (
            0.5 * (nu - self.nu0) * log_det
            - 0.5 * nu * d
            + 0.5 * nu * _trace(np.linalg.inv(self.S), np.broadcast_to(self.S0, self.S.shape))
            + _log_normaliser(self.nu0, self.S0)
            - _log_normaliser(nu, self.S)
        )
        return float((normal + wishart).sum())


def _outer(x: Array) -> Array:
    return x[..., :, None] * x[..., None, :]


def _trace(a: Array, b: Array) -> Array:
    return np.einsum("...de,...ed->...", a, b)


def _log_normaliser(nu: float | Array, S: Array) -> Array:
    """Of the Wishart density, up to what depends on the dimension alone."""
    d = S.shape[-1]
    half = np.asarray(nu)[..., None] / 2
    result: Array = gammaln(half - np.arange(d) / 2).sum(-1) - half[..., 0] * (
        np.linalg.slogdet(S)[1] - d * np.log(2)
    )
    return result


class Mixture:
    """Weights, emissions and responsibilities; `sweep` updates them in the order of their names."""

    def __init__(self, weights: Dirichlets, emissions: Emissions, x: Array, r: Array) -> None:
        self.weights, self.emissions, self.x, self.r = weights, emissions, x, r
        emissions.see(x, r)

    def sweep(self, order: Sequence[str]) -> float:
        """One update of each; the negative bound."""
        for name in order:
            getattr(self, f"_{name}")()
        return -self.bound()

    def _weights(self) -> None:
        self.weights.update(self.r.sum(0))

    def _means(self) -> None:
        self.emissions.update_mean()

    def _precisions(self) -> None:
        self.emissions.update_precision()

    def _states(self) -> None:
        self.logits = self._logits()
        top = self.logits.max(1, keepdims=True)
        self.r = np.exp(self.logits - top)
        self.r /= self.r.sum(1, keepdims=True)
        self.emissions.see(self.x, self.r)

    def _logits(self) -> Array:
        return self.weights.log_mean + self.emissions.log_likelihood(self.x)

    def bound(self) -> float:
        """E log p(x, all) + entropy of q, for the present values."""
        entropy = -(self.r * np.log(np.maximum(self.r, 1e-300))).sum()
        expected = (self.r * self._logits()).sum()
        return float(expected + entropy) - self.weights.kl - self.emissions.kl


class Chains:
    """Hidden Markov sequences x (S, T) of scalars, all of one length.

    The states of each sequence have one posterior with all its correlations: forward and backward.
    """

    def __init__(
        self, start: Dirichlets, moves: Dirichlets, emissions: Emissions, x: Array, r: Array
    ) -> None:
        """r (S, T, K): at first the states are independent of each other."""
        self.start, self.moves, self.emissions, self.x = start, moves, emissions, x
        self.r = r
        self.pairs = np.einsum("stk,stl->kl", r[:, :-1], r[:, 1:], optimize=True)
        self.entropy = -(r * np.log(np.maximum(r, 1e-300))).sum()
        self._see()

    def _see(self) -> None:
        self.emissions.see(self.x.reshape(-1, 1, 1), self.r.reshape(-1, self.r.shape[-1]))

    def sweep(self, order: Sequence[str]) -> float:
        """One update of each; the negative bound."""
        for name in order:
            getattr(self, f"_{name}")()
        return -self.bound()

    def _start(self) -> None:
        self.start.update(self.r[:, 0].sum(0))

    def _moves(self) -> None:
        self.moves.update(self.pairs)

    def _means(self) -> None:
        self.emissions.update_mean()

    def _precisions(self) -> None:
        self.emissions.update_precision()

    def _logits(self) -> Array:
        return self.emissions.log_likelihood(self.x.reshape(-1, 1, 1)).reshape(*self.x.shape, -1)

    def _states(self) -> None:
        first, move = np.exp(self.start.log_mean), np.exp(self.moves.log_mean)
        logits = self._logits()
        top = logits.max(-1, keepdims=True)
        like = np.exp(logits - top)
        S, T, K = like.shape
        forward, scale = np.empty((S, T, K)), np.empty((S, T, 1))
        for t in range(T):
            a = like[:, t] * (first if t == 0 else forward[:, t - 1] @ move)
            scale[:, t] = a.sum(-1, keepdims=True)
            forward[:, t] = a / scale[:, t]
        backward = np.ones((S, T, K))
        for t in range(T - 1, 0, -1):
            backward[:, t - 1] = (like[:, t] * backward[:, t]) @ move.T / scale[:, t]
        after = like[:, 1:] * backward[:, 1:] / scale[:, 1:]
        self.pairs = np.einsum("stk,stl->kl", forward[:, :-1], after, optimize=True) * move
        self.r = forward * backward
        log_evidence = float(np.log(scale).sum() + top.sum())
        self.entropy = log_evidence - self._expected(logits)
        self._see()

    def _expected(self, logits: Array) -> float:
        """E of the log joint of states and rows."""
        return float(
            (self.r[:, 0].sum(0) * self.start.log_mean).sum()
            + (self.pairs * self.moves.log_mean).sum()
            + (self.r * logits).sum()
        )

    def bound(self) -> float:
        """E log p(x, all) + entropy of q, for the present values."""
        expected = self._expected(self._logits())
        return expected + self.entropy - self.start.kl - self.moves.kl - self.emissions.kl
