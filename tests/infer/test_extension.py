"""A family and a density rule of the user's own take part like the built-in ones."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate

from pyro_cvi import CVI, AbstractFamily, AutoCVI, density, explain, register_family
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
