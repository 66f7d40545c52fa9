"""Priors with pseudo-observations of their predictors, against the dense Gaussian."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_cvi.gaussians.process import LowRank, Predictors, root_of
from pyro_cvi.structured import ProcessBelief

CASES = {
    "open": (7, 0, (1,), (4,)),
    "closed, read as it is": (0, 5, (1,), (5,)),
    "closed, fewer predictors": (0, 8, (1,), (3,)),
    "closed, groups of two sizes": (0, 6, (1, 2), (4, 3)),
    "both": (5, 4, (2,), (3,)),
    "more predictors than scalars": (3, 0, (1,), (6,)),
}


class Problem:
    """A random block, and the same Gaussian as a dense one."""

    def __init__(self, name: str, negative: bool) -> None:
        opened, closed, self.widths, self.counts = CASES[name]
        d = opened + closed
        rows = sum(a * b for a, b in zip(self.widths, self.counts, strict=True))
        order = torch.randperm(d)
        draws = torch.randn(closed, 3 * max(closed, 1))
        kernel = torch.cov(draws).reshape(closed, closed) + 0.1 * torch.eye(closed)
        design = torch.eye(rows) if name == "closed, read as it is" else torch.randn(rows, d)
        self.spec = Predictors(
            design, self.widths, self.counts, order[:opened].sort().values,
            order[opened:].sort().values, torch.randn(closed), torch.linalg.cholesky(kernel),
        )  # fmt: skip
        self.negative = negative

    def belief(self) -> ProcessBelief:
        curvature = []
        for w, c in zip(self.widths, self.counts, strict=True):
            x = torch.randn(c, w, w)
            block = x @ x.mT + 0.1 * torch.eye(w)
            if self.negative:
                block[0] = -0.02 * block[0]
            curvature.append(block)
        spec = self.spec
        rows = torch.randn(spec.rows) if len(spec.closed) else torch.zeros(spec.rows)
        n = len(spec.open)
        return ProcessBelief(spec, torch.randn(n), torch.rand(n) + 0.5, rows, curvature)

    def dense(self, q: ProcessBelief) -> tuple[Tensor, Tensor]:
        """(m, S) of the joint Gaussian."""
        spec = self.spec
        prior = torch.zeros(spec.size, spec.size)
        prior[spec.open, spec.open] = 1 / q.precision
        kernel = spec.prior_tril @ spec.prior_tril.T
        prior[spec.closed[:, None], spec.closed] = kernel
        middle = torch.block_diag(*[b for g in q.curvature for b in g])
        mean = torch.zeros(spec.size)
        mean[spec.open] = q.loc
        mean[spec.closed] = spec.prior_loc + kernel @ spec.design[:, spec.closed].T @ q.coefficients
        return mean, torch.linalg.inv(prior) + spec.design.T @ middle @ spec.design


@pytest.fixture(params=[(n, s) for n in CASES for s in (False, True)], ids=str)
def problem(request: pytest.FixtureRequest) -> Problem:
    return Problem(*request.param)


def test_moments_are_those_of_the_dense_gaussian(problem: Problem) -> None:
    q = problem.belief()
    mean, precision = problem.dense(q)
    cov = torch.linalg.inv(precision)
    loc, variance = q.marginals()
    torch.testing.assert_close(loc, mean)
    torch.testing.assert_close(variance, cov.diagonal())
    some = torch.randperm(len(mean))[:4]
    torch.testing.assert_close(q.covariance(some), cov[some[:, None], some])
    design = problem.spec.design
    *_, views = [q.views()]
    start = 0
    for loc, own in views[len(views) - len(problem.widths) :]:
        n = loc.numel()
        torch.testing.assert_close(loc.reshape(-1), (design @ mean)[start : start + n])
        whole = (design @ cov @ design.T)[start : start + n, start : start + n]
        w = loc.shape[1]
        for i, block in enumerate(own):
            here = slice(i * w, (i + 1) * w)
            torch.testing.assert_close(block, whole[here, here])
        start += n


def test_entropy_and_kl_are_those_of_the_dense_gaussian(problem: Problem) -> None:
    q, r = problem.belief(), problem.belief()
    (mean, precision), (other, its) = problem.dense(q), problem.dense(r)
    law = MultivariateNormal(mean, precision_matrix=(precision + precision.T) / 2)
    that = MultivariateNormal(other, precision_matrix=(its + its.T) / 2)
    torch.testing.assert_close(q.kl(r), kl_divergence(law, that))
    expected, spec = law.entropy(), problem.spec
    if len(spec.closed):  # and E log p of the closed scalars
        prior = MultivariateNormal(spec.prior_loc, scale_tril=spec.prior_tril)
        cov = torch.linalg.inv(precision)[spec.closed[:, None], spec.closed]
        inverse = torch.cholesky_inverse(spec.prior_tril)
        expected = expected + prior.log_prob(mean[spec.closed]) - 0.5 * (inverse * cov).sum()
    torch.testing.assert_close(q.entropy(), expected)
    z = torch.randn(3, len(mean))
    torch.testing.assert_close(
        0.5 * (q.log_det() - q.quadratic(z - mean) - len(mean) * 1.8378770664093453),
        law.log_prob(z),
    )


def test_a_step_is_that_of_the_dense_gaussian(problem: Problem) -> None:
    q, spec, rho = problem.belief(), problem.spec, 0.3
    mean, _ = problem.dense(q)
    gradient: list[Tensor] = []
    total = torch.zeros(spec.size)
    precision = q.precision
    if len(spec.open):
        g, v = torch.randn(len(spec.open), 1), -torch.rand(len(spec.open), 1, 1) - 0.2
        gradient += [g, v]
        total[spec.open] += g[:, 0]
        precision = precision + rho * (-2 * v[:, 0, 0] - precision)
    slopes, curvature = [], []
    for c, old in zip(problem.counts, q.curvature, strict=True):
        w = old.shape[-1]
        x = torch.randn(c, w, w)
        h = -(x @ x.mT) - 0.1 * torch.eye(w)
        slopes.append(torch.randn(c, w))
        gradient += [slopes[-1], h]
        curvature.append(old + rho * (-2 * h - old))
    total += spec.design.T @ torch.cat([s.reshape(-1) for s in slopes])
    kernel = spec.prior_tril @ spec.prior_tril.T
    total[spec.closed] -= torch.linalg.solve(kernel, mean[spec.closed] - spec.prior_loc)
    expected = ProcessBelief(spec, q.loc, precision, q.coefficients, curvature)
    _, after = problem.dense(expected)
    new, step = q.moved(gradient, rho)
    assert step.improper == 0
    loc, variance = new.marginals()
    torch.testing.assert_close(loc, mean + rho * torch.linalg.solve(after, total))
    torch.testing.assert_close(variance, torch.linalg.inv(after).diagonal())


def test_draws_have_its_covariance(problem: Problem) -> None:
    q, n = problem.belief(), 8000
    mean, precision = problem.dense(q)
    cov = torch.linalg.inv(precision)
    z = torch.stack([q.draw() for _ in range(n)])
    error = (cov.diagonal()[:, None] * cov.diagonal() + cov**2).sqrt() / n**0.5
    assert bool(((torch.cov(z.T) - cov).abs() < 6 * error).all())
    assert bool(((z.mean(0) - mean).abs() < 6 * (cov.diagonal() / n).sqrt()).all())


def single(q: ProcessBelief) -> ProcessBelief:
    """The same belief, rounded to float32."""
    spec = q.spec
    rounded = Predictors(
        spec.design.float(), spec.widths, spec.counts, spec.open, spec.closed,
        spec.prior_loc.float(), spec.prior_tril.float(),
    )  # fmt: skip
    curvature = [c.float() for c in q.curvature]
    return ProcessBelief(
        rounded, q.loc.float(), q.precision.float(), q.coefficients.float(), curvature
    )


def test_float32_loses_what_its_conditioning_says(problem: Problem) -> None:
    """Against the dense Gaussian in float64: D eps, times the conditions of I + R^T Lambda R and K."""
    q = problem.belief()
    mean, precision = problem.dense(q)
    cov = torch.linalg.inv(precision)
    near = single(q)
    root = q.parts.root
    middle = torch.block_diag(*[b for g in q.curvature for b in g])
    number = float(torch.linalg.cond(torch.eye(root.shape[1]) + root.T @ middle @ root))
    if len(problem.spec.closed):
        number *= float(torch.linalg.cond(problem.spec.prior_tril)) ** 2
    unit = 4 * (len(mean) + len(middle)) * torch.finfo(torch.float32).eps * number
    loc, variance = near.marginals()
    assert loc.dtype == variance.dtype == near.entropy().dtype == torch.float32
    assert float((loc - mean).abs().max()) < unit * float(mean.abs().max())
    assert float((variance - cov.diagonal()).abs().max()) < unit * float(cov.diagonal().max())
    assert abs(float(near.entropy() - q.entropy())) < unit * (1 + abs(float(q.entropy())))
    assert abs(float(near.log_det()) - float(torch.logdet(precision))) < unit * len(mean)


def test_a_step_out_of_the_domain_is_shortened() -> None:
    q = Problem("closed, read as it is", False).belief()
    bad = torch.full((5, 1, 1), 50.0)  # curvature of the wrong sign
    new, step = q.moved([torch.zeros(5, 1), bad], 1.0)
    assert step.improper == 1 and step.shortened == 1
    assert new.parts.is_proper


def test_pseudo_observations_stay_while_the_prior_changes() -> None:
    """N(prior') x the same pseudo-observations, from natural parameters."""
    problem = Problem("closed, fewer predictors", False)
    q, spec = problem.belief(), problem.spec
    mean, precision = problem.dense(q)
    sites = precision - torch.cholesky_inverse(spec.prior_tril)
    first = precision @ mean - torch.linalg.solve(
        spec.prior_tril @ spec.prior_tril.T, spec.prior_loc
    )
    loc, tril = torch.randn(8), torch.linalg.cholesky(torch.cov(torch.randn(8, 30)))
    new = q.with_prior(loc, tril)
    kernel = tril @ tril.T
    after = torch.linalg.inv(kernel) + sites
    expected = torch.linalg.solve(after, torch.linalg.solve(kernel, loc) + first)
    torch.testing.assert_close(new.marginals()[0], expected)
    torch.testing.assert_close(new.marginals()[1], torch.linalg.inv(after).diagonal())


def test_a_singular_kernel_has_a_root() -> None:
    x = torch.randn(6, 3)
    kernel = x @ x.T
    root = root_of(kernel)
    torch.testing.assert_close(root @ root.T, kernel)
    spec = Predictors(
        torch.cat([torch.eye(4), torch.eye(4)]), (1,), (8,), torch.arange(4), torch.arange(0),
        torch.zeros(0), torch.zeros(0, 0),
    )  # fmt: skip
    twice = LowRank(spec, torch.ones(4), [torch.full((8, 1, 1), 0.5)])
    torch.testing.assert_close(twice.open_variances, torch.full((4,), 0.5))
