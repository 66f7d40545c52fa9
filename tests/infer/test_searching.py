"""Steps whose length is searched for, element by element: see `pyro_cvi.searching`."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_value

from pyro_cvi import CVI, AutoCVI


def counts(y):
    with pyro.plate("cells", len(y)):
        x = pyro.sample("x", dist.Normal(torch.zeros_like(y), 10.0))
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def after_one_step(y, start):
    y, start = torch.tensor(y, dtype=torch.float64), torch.tensor(start, dtype=torch.float64)
    cvi = CVI(counts, AutoCVI(counts, init_loc_fn=init_to_value(values={"x": start})))
    cvi.step(y)
    return cvi.guide.posterior("x").mean


def test_an_element_that_overshoots_does_not_hold_up_the_others():
    """From a rate of one, a full step towards a count of a million overshoots; the others are near."""
    together = after_one_step([100.0, 1e6, 100.0], [4.5, 0.0, 4.5])
    assert (together[[0, 2]] - 4.6).abs().max() < 0.02  # log(100) = 4.605
    assert 0 < float(together[1]) < 30
