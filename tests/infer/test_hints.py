"""The report names the sites whose intervals this kind of posterior makes too narrow, and only these."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, explain, integrate


def schools(y, s):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("n", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, s), obs=y)


def measured(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    with pyro.plate("n", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)
        pyro.sample("y", dist.Normal(b * z, 0.3), obs=y)


def line(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 5.0))
    s = pyro.sample("s", dist.HalfNormal(2.0))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(w * x, s), obs=y)


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def test_a_scale_of_few_groups_is_named_and_integrate_widens_it():
    (hint,) = explain(schools, EFFECTS, ERRORS).hints
    assert hint.startswith("tau: a scale that 8 numbers tell of")
    assert "integrate(cvi, 'tau', *args)" in str(explain(schools, EFFECTS, ERRORS))
    assert "integrate" in explain(schools, EFFECTS, ERRORS)._repr_html_()
    cvi = CVI(schools, AutoCVI(schools))
    cvi.run(EFFECTS, ERRORS)
    mixed = integrate(cvi, "tau", EFFECTS, ERRORS)
    assert float(mixed.posterior("tau").stddev) > 1.1 * float(cvi.guide.posterior("tau").stddev)


@pytest.mark.parametrize(("n", "count"), [(20, 1), (500, 0)])
def test_a_noise_of_many_rows_is_not_named(n, count):
    x = torch.randn(n)
    assert len(explain(line, x, x + torch.randn(n)).hints) == count


def test_a_slope_beside_its_covariates_is_named_unless_they_are_joint():
    x, y = torch.randn(30), torch.randn(30)
    (found,) = explain(measured, x, y).products
    assert found.site == "b"
    assert found.others == ("z",)
    y = 0.8 * x + 0.1 * torch.randn(30)
    cvi = CVI(measured, AutoCVI(measured), seed=0)
    cvi.run(x, y)
    assert cvi.guide.plan.joint
    assert not cvi.explain().products
