"""Every pair with `obs_mask`: the missing cells are latents, and the fit is mean-field over them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pair_cases import (
    CANONICAL,
    PAIRS,
    check_posterior,
    close,
    fit_to_the_end,
    hows,
    natural_of,
    posterior_with_missing,
)

from pyro_cvi import CVI, AutoCVI, CVIError

IMPUTED = {
    n: PAIRS[n]
    for n in [*CANONICAL, "gamma-inverse_gamma_rate", "inverse_gamma-gamma_scale"]
    if PAIRS[n].missing is not None or PAIRS[n].finite is not None
}
REFUSED = ("beta-geometric", "beta-negative_binomial", "dirichlet-multinomial", "gamma-poisson")


def hidden(x, keep, event_dim):
    """The data with NaN where they are not observed."""
    if x.dtype == torch.long:
        return x
    return torch.where(keep[(..., *([None] * event_dim))], x, torch.full_like(x, float("nan")))


def one_plate(pair, x, keep):
    def model():
        z = pyro.sample("z", pair.prior(torch.zeros(())))
        with pyro.plate("data", len(x)):
            pyro.sample("x", pair.likelihood(z), obs=x, obs_mask=keep)

    return model, torch.zeros(())


def rows_and_columns(pair, x, keep):
    k = torch.arange(float(len(x))).unsqueeze(-1)

    def model():
        with pyro.plate("rows", x.shape[0], dim=-2):
            z = pyro.sample("z", pair.prior(k))
            with pyro.plate("columns", x.shape[1], dim=-1):
                pyro.sample("x", pair.likelihood(z), obs=x, obs_mask=keep)

    return model, k


def replicates(pair, x, keep):
    k = torch.arange(float(x.shape[1]))

    def model():
        with pyro.plate("k", x.shape[1], dim=-1):
            z = pyro.sample("z", pair.prior(k))
            with pyro.plate("data", x.shape[0], dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x, obs_mask=keep)

    return model, k


LINE = torch.tensor([True, True, False, True, True, False])
TABLE = torch.tensor(
    [[True, False, True, True], [True, True, True, True], [True, False, False, True]]
)
STRUCTURES = {"one_plate": (one_plate, LINE), "rows": (rows_and_columns, TABLE),
              "replicates": (replicates, TABLE)}  # fmt: skip


DTYPES = [(s, torch.float64) for s in STRUCTURES] + [("one_plate", torch.float32)]


@pytest.mark.parametrize(("structure", "dtype"), DTYPES, indirect=["dtype"])
@pytest.mark.parametrize("pair", IMPUTED.values(), ids=IMPUTED)
def test_missing_cells_are_imputed_as_mean_field_has_it(pair, structure, dtype):
    """Posterior and bound at the fixed point of q(z) prod q(x_i)."""
    make, keep = STRUCTURES[structure]
    x = pair.data(tuple(keep.shape))
    model, k = make(pair, hidden(x, keep, pair.data_event_dim), keep)
    prior = pair.prior(k)
    expected, elbo = posterior_with_missing(
        pair,
        natural_of(pair.family, prior),
        x if x.dtype == torch.long else x.double(),
        keep,
        tuple(prior.batch_shape),
    )
    guide, cvi, loss = fit_to_the_end(model)
    check_posterior(guide, "z", pair.family, expected, dtype)
    close(-loss, elbo, dtype, "the bound")
    assert hows(cvi) == {"exact"}, cvi.explain()


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_value_without_a_posterior_family_is_refused_by_name(name):
    """A count without bound has no posterior family; the error says so."""
    pair = PAIRS[name]
    model, _ = one_plate(pair, pair.data((6,)), LINE)
    with pytest.raises(CVIError, match="x_unobserved"):
        CVI(model, AutoCVI(model)).step()


def test_missing_log_normal_values_are_the_gaussian_of_their_logarithms():
    """A latent location, in one block with the missing logs: its posterior is that of the seen ones."""
    x = torch.tensor([0.5, 1.0, 2.0, 4.0])

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4):
            seen = torch.tensor([True, False, True, True])
            pyro.sample("x", dist.LogNormal(z, 0.5), obs=x, obs_mask=seen)

    guide, cvi, _ = fit_to_the_end(model)
    precision = 1 + 3 * 4.0
    mean = 4 * float(x[[0, 2, 3]].log().sum()) / precision
    q = guide.posterior("z")
    assert float(q.loc) == pytest.approx(mean, abs=1e-9)
    assert float(q.scale) == pytest.approx(precision**-0.5, rel=1e-9)
    u = guide.posterior("x_unobserved").base_dist
    assert float(u.loc[1]) == pytest.approx(mean, abs=1e-9)
    assert float(u.scale[1]) == pytest.approx((1 / precision + 0.25) ** 0.5, rel=1e-9)


def test_all_cells_observed_is_the_exact_posterior():
    """An obs_mask that is on everywhere changes nothing."""
    x = torch.tensor([1.0, 0.0, 1.0])
    model, _ = one_plate(PAIRS["beta-bernoulli"], x, torch.ones(3, dtype=torch.bool))
    guide, _, loss = fit_to_the_end(model)
    q = guide.posterior("z")
    assert (float(q.concentration1), float(q.concentration0)) == (4.0, 4.0)
    b = dist.Beta(2.0, 3.0), dist.Beta(4.0, 4.0)
    half, one = torch.tensor(0.5), torch.tensor(0.5).log() * 3
    close(-loss, one + b[0].log_prob(half) - b[1].log_prob(half), torch.float64)
