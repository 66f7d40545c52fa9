"""A family and a density rule of the user's own take part like the built-in ones."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate

from pyro_cvi import CVI, AbstractFamily, AutoCVI, CVIError, density, explain, register_family
from pyro_cvi.densities.registry import _RULES
from pyro_cvi.families.registry import _FAMILIES


class HalfNormal(dist.HalfNormal):
    """A distribution of the test's own, so that the built-in table is not changed."""

    def expand(self, batch_shape, _instance=None):
        return HalfNormal(self.scale.expand(batch_shape))


@pytest.fixture
def nakagami():
    """q(z) ~ z^a exp(b z^2): the square of z is Gamma((a + 1) / 2, -b)."""

    @register_family(HalfNormal)
    class Nakagami(AbstractFamily):
        name = "Nakagami"
        statistics = ("log", "square")
        event_dims = (0, 0)

        def sufficient_statistics(self, x):
            return x.log(), x * x

        def log_partition(self, natural):
            shape = (natural[0] + 1) / 2
            return torch.lgamma(shape) - shape * (-natural[1]).log() - math.log(2)

        def to_mean(self, natural):
            shape = (natural[0] + 1) / 2
            log = (torch.digamma(shape) - (-natural[1]).log()) / 2
            return log, shape / -natural[1]

        def to_natural(self, mean):
            raise NotImplementedError

        def to_distribution(self, natural):
            square = dist.Gamma((natural[0] + 1) / 2, -natural[1])
            return dist.TransformedDistribution(square, dist.transforms.PowerTransform(0.5))

        def natural_of_core(self, core):
            return torch.zeros_like(core.scale), -0.5 / core.scale**2

        def fisher_solve(self, natural, gradient):
            raise NotImplementedError

        def is_proper(self, natural):
            return (natural[0] > -1) & (natural[1] < 0)

        def max_step(self, natural, direction):
            raise NotImplementedError

    @density(HalfNormal)
    def half_normal(d, x):
        """1/2 log 2/pi - log scale - x^2 / (2 scale^2)."""
        return 0.5 * math.log(2 / math.pi) - d.scale.log() - 0.5 * x**2 * d.scale**-2

    yield Nakagami
    del _RULES[HalfNormal]
    del _FAMILIES[HalfNormal]


def test_a_root_precision_with_a_family_of_ones_own_is_exact(nakagami):
    y = torch.tensor([0.3, -0.2, 0.5, 0.1])

    def model(y):
        z = pyro.sample("z", HalfNormal(torch.tensor(4.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, 1 / z), obs=y)

    assert {e.how for e in explain(model, y).edges} == {"exact"}
    cvi = CVI(model, AutoCVI(model))
    loss = cvi.step(y)
    ss = float(y.square().sum())

    def joint(z):
        prior = math.sqrt(2 / math.pi) / 4 * math.exp(-(z**2) / 32)
        return prior * z**4 * (2 * math.pi) ** -2 * math.exp(-0.5 * z * z * ss)

    evidence, _ = integrate.quad(joint, 0, 40)
    assert loss == pytest.approx(-math.log(evidence), rel=1e-7)
    draws = torch.stack([cvi.guide(y)["z"] for _ in range(2000)])
    second = (4 + 1) / 2 / (0.5 * ss + 1 / 32)
    assert float(draws.square().mean()) == pytest.approx(second, rel=0.1)


def root_precision(y):
    z = pyro.sample("z", HalfNormal(torch.tensor(4.0)).expand([2]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, 1 / z).to_event(1), obs=y)


PLACED = pyro.infer.autoguide.init_to_value(values={"z": torch.tensor([0.5, 3.0])})


def test_a_place_for_a_site_whose_family_cannot_take_it_is_an_error(nakagami):
    guide = AutoCVI(root_precision, init_loc_fn=PLACED)
    with pytest.raises(CVIError, match=r"site 'z'.*Nakagami.*around\(point, spread\)"):
        guide(torch.ones(3, 2))


def test_a_strategy_for_all_sites_leaves_such_a_site_at_its_prior(nakagami):
    guide = AutoCVI(root_precision, init_loc_fn=pyro.infer.autoguide.init_to_mean)
    guide(torch.ones(3, 2))
    torch.testing.assert_close(
        guide.posterior("z").base_dist.base_dist.rate, torch.full((2,), 1 / 32)
    )


def test_a_family_that_knows_what_lies_near_a_point_starts_there(nakagami, monkeypatch):
    def around(self, point, spread):
        """The square is Gamma(n, n / point^2), of relative standard deviation 2 spread."""
        n = 1 / (2 * spread) ** 2
        return torch.full_like(point, 2 * n - 1), -n / point**2

    monkeypatch.setattr(nakagami, "around", around)
    guide = AutoCVI(root_precision, init_loc_fn=PLACED)
    guide(torch.ones(3, 2))
    draws = guide.posterior("z").sample((4000,))
    standard_error = 0.1 * draws.mean(0) / 4000**0.5
    assert (
        (draws.mean(0) - torch.tensor([0.5, 3.0])).abs() < 0.01 * draws.mean(0) + 5 * standard_error
    ).all()
