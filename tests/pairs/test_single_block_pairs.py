"""Every conjugate pair in every structure: one step is the exact posterior, the loss its evidence."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pair_cases import (
    BETA,
    CANONICAL,
    GAMMA,
    INVERSE_GAMMA,
    OPAQUE_COVARIANCE,
    PAIRS,
    check_posterior,
    close,
    exact_posterior,
    fitted,
    hows,
    natural_of,
    tensor,
)
from pyro import poutine


class Case:
    """A model of site "z", with what the oracle must know: data, weights, shape and scale of z."""

    def __init__(self, model, x, *, k=None, prior=None, weight=1.0, scale=1.0, args=()):
        self.model, self.x, self.k, self.prior = model, x, k, prior
        self.weight, self.scale, self.args = weight, scale, args


def latent(pair, k):
    return pyro.sample("z", pair.prior(k))


def zero():
    return torch.zeros(())


def plain_plate(pair):
    x = pair.data((5,))

    def model(x):
        z = latent(pair, zero())
        with pyro.plate("data", len(x)):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, args=(x,))


def data_in_a_closure(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", len(x)):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x)


def conditioned(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5):
            pyro.sample("x", pair.likelihood(z))

    return Case(poutine.condition(model, data={"x": x}), x)


def nested_plates(pair):
    x = pair.data((2, 3))

    def model():
        z = latent(pair, zero())
        with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 3, dim=-1):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x)


def latent_in_the_outer_plate(pair):
    x, k = pair.data((4, 3)), torch.arange(4.0)

    def model():
        with pyro.plate("outer", 4, dim=-2):
            z = latent(pair, k.unsqueeze(-1))
            with pyro.plate("inner", 3, dim=-1):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k.unsqueeze(-1))


def crossed_rows(pair):
    x, k = pair.data((3, 4)), torch.arange(3.0).unsqueeze(-1)

    def model():
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            z = latent(pair, k)
        with rows, columns:
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def crossed_columns(pair):
    x, k = pair.data((3, 4)), torch.arange(4.0)

    def model():
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with columns:
            z = latent(pair, k)
        with columns, rows:
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def plates_far_to_the_left(pair):
    x, k = pair.data((3, 1, 2, 1)), torch.arange(3.0).reshape(3, 1, 1, 1)

    def model():
        with pyro.plate("k", 3, dim=-4):
            z = latent(pair, k)
            with pyro.plate("data", 2, dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def replicates(pair):
    x, k = pair.data((4, 3)), torch.arange(3.0)

    def model():
        with pyro.plate("k", 3, dim=-1):
            z = latent(pair, k)
            with pyro.plate("data", 4, dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def replicates_in_two_plates(pair):
    x, k = pair.data((2, 2, 3)), torch.arange(6.0).reshape(2, 3)

    def model():
        with pyro.plate("i", 2, dim=-2), pyro.plate("j", 3, dim=-1):
            z = latent(pair, k)
            with pyro.plate("data", 2, dim=-3):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def one_datum_each(pair):
    x, k = pair.data((5,)), torch.arange(5.0)

    def model():
        with pyro.plate("data", 5):
            pyro.sample("x", pair.likelihood(latent(pair, k)), obs=x)

    return Case(model, x, k=k)


def data_to_event(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        pyro.sample("x", pair.likelihood(z).expand([5]).to_event(1), obs=x)

    return Case(model, x)


def data_to_event_in_a_plate(pair):
    x = pair.data((2, 3))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 2):
            pyro.sample("x", pair.likelihood(z).expand([2, 3]).to_event(1), obs=x)

    return Case(model, x)


def latent_to_event(pair):
    x, k = pair.data((4, 3)), torch.arange(3.0)

    def model():
        z = pyro.sample("z", pair.prior(k).to_event(1))
        with pyro.plate("data", 4):
            pyro.sample("x", pair.likelihood(z).to_event(1), obs=x)

    return Case(model, x, k=k)


def latent_to_event_twice(pair):
    x, k = pair.data((2, 2, 3)), torch.arange(6.0).reshape(2, 3)

    def model():
        z = pyro.sample("z", pair.prior(k).to_event(2))
        with pyro.plate("data", 2):
            pyro.sample("x", pair.likelihood(z).to_event(2), obs=x)

    return Case(model, x, k=k)


def latent_to_event_in_a_plate(pair):
    x, k = pair.data((2, 2, 3)), torch.arange(6.0).reshape(2, 3)

    def model():
        with pyro.plate("k", 2, dim=-1):
            z = pyro.sample("z", pair.prior(k).to_event(1))
            with pyro.plate("data", 2, dim=-2):
                pyro.sample("x", pair.likelihood(z).to_event(1), obs=x)

    return Case(model, x, k=k)


def expanded(pair):
    x, prior = pair.data((4, 3)), pair.prior(zero()).expand([3])

    def model():
        with pyro.plate("k", 3, dim=-1):
            z = pyro.sample("z", pair.prior(zero()).expand([3]))
            with pyro.plate("data", 4, dim=-2):
                pyro.sample("x", pair.likelihood(z).expand([4, 3]), obs=x)

    return Case(model, x, prior=prior)


def expanded_by_the_plate(pair):
    x, prior = pair.data((4, 3)), pair.prior(zero()).expand([3])

    def model():
        with pyro.plate("k", 3, dim=-1):
            z = latent(pair, zero())
            with pyro.plate("data", 4, dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, prior=prior)


def expanded_to_event(pair):
    x, prior = pair.data((4, 3)), pair.prior(zero()).expand([3])

    def model():
        z = pyro.sample("z", pair.prior(zero()).expand([3]).to_event(1))
        with pyro.plate("data", 4, dim=-2), pyro.plate("k", 3, dim=-1):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, prior=prior)


def expanded_by_itself(pair):
    x, prior = pair.data((4, 3)), pair.prior(zero()).expand([3])

    def model():
        z = pyro.sample("z", pair.prior(zero()).expand_by([3]).to_event(1))
        with pyro.plate("data", 4):
            pyro.sample("x", pair.likelihood(z).to_event(1), obs=x)

    return Case(model, x, prior=prior)


def with_nan(x, keep):
    """The data with NaN where they are masked; labels have none and get a wrong class."""
    x = x.clone()
    if x.dtype == torch.long:
        x[~keep] = (x[~keep] + 1) % 3
    else:
        x[~keep] = float("nan")
    return x


def indexed_by_group(pair):
    # groups of two: cell n is in group n mod 3, so that the cells of a table (2, 3) are its columns
    x, k, group = pair.data((2, 3)), torch.arange(3.0), torch.arange(6) % 3

    def model():
        with pyro.plate("groups", 3):
            z = latent(pair, k)
        with pyro.plate("data", 6):
            cells = x.reshape(6, *x.shape[2:])
            pyro.sample("x", pair.likelihood(z[group]), obs=cells)

    return Case(model, x, k=k)


def indexed_by_rows_and_columns(pair):
    x, k = pair.data((2, 2, 3)), torch.arange(6.0).reshape(2, 3)
    i, j = torch.arange(12) // 3 % 2, torch.arange(12) % 3

    def model():
        with pyro.plate("i", 2, dim=-2), pyro.plate("j", 3, dim=-1):
            z = latent(pair, k)
        with pyro.plate("data", 12):
            cells = x.reshape(12, *x.shape[3:])
            pyro.sample("x", pair.likelihood(z[i, j]), obs=cells)

    return Case(model, x, k=k)


def masked(pair):
    keep = torch.tensor([True, False, True, True, False])
    x = with_nan(pair.data((5,)), keep)

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5), poutine.mask(mask=keep):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=keep.double())


def masked_in_two_plates(pair):
    keep = torch.tensor([[True, False, True], [False, False, True]])
    x, k = with_nan(pair.data((2, 3)), keep), torch.arange(2.0).unsqueeze(-1)

    def model():
        with pyro.plate("rows", 2, dim=-2):
            z = latent(pair, k)
            with pyro.plate("columns", 3, dim=-1), poutine.mask(mask=keep):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=keep.double(), k=k)


def masked_distribution(pair):
    keep = torch.tensor([True, False, True, True, False])
    x = pair.data((5,))  # Pyro takes no NaN under `.mask`

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5):
            pyro.sample("x", pair.likelihood(z).expand([5]).mask(keep), obs=x)

    return Case(model, x, weight=keep.double())


def masked_distribution_to_event(pair):
    keep = torch.tensor([True, False, True, True, False])
    x = pair.data((5,))  # Pyro takes no NaN under `.mask`

    def model():
        z = latent(pair, zero())
        pyro.sample("x", pair.likelihood(z).expand([5]).mask(keep).to_event(1), obs=x)

    return Case(model, x, weight=keep.double())


def masked_all(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5), poutine.mask(mask=False):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=0.0)


def masked_all_by_a_tensor(pair):
    keep = torch.zeros(5, dtype=torch.bool)
    x = with_nan(pair.data((5,)), keep)

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5), poutine.mask(mask=keep):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=0.0)


def scaled(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5), poutine.scale(scale=2.5):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=2.5)


def scaled_by_a_tensor(pair):
    x, s = pair.data((5,)), torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5), poutine.scale(scale=s):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=s)


def scaled_twice_and_masked(pair):
    keep = torch.tensor([True, False, True, True, False])
    x, s = with_nan(pair.data((5,)), keep), torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])

    def model():
        z = latent(pair, zero())
        outer, inner = poutine.scale(scale=s), poutine.scale(scale=2.0)
        with pyro.plate("data", 5), outer, poutine.mask(mask=keep), inner:
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, weight=2 * s.double() * keep)


def scaled_with_its_prior(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 5):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(poutine.scale(model, scale=1.5), x, weight=1.5, scale=1.5)


def scaled_prior_of_replicates(pair):
    x, k, s = pair.data((4, 3)), torch.arange(3.0), torch.tensor([1.5, 2.0, 1.25])

    def model():
        with pyro.plate("k", 3, dim=-1):
            with poutine.scale(scale=s):
                z = latent(pair, k)
            with pyro.plate("data", 4, dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k, scale=s)


def python_loop(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        for i in range(5):
            pyro.sample(f"obs_{i}", pair.likelihood(z), obs=x[i])

    return Case(model, x)


def python_loop_with_masks(pair):
    keep = torch.tensor([True, False, True, True, False])
    x = with_nan(pair.data((5,)), keep)

    def model():
        z = latent(pair, zero())
        for i in range(5):
            with poutine.mask(mask=keep[i]):
                pyro.sample(f"obs_{i}", pair.likelihood(z), obs=x[i])

    return Case(model, x, weight=keep.double())


def sequential_plate(pair):
    x = pair.data((5,))

    def model():
        z = latent(pair, zero())
        for i in pyro.plate("data", 5):
            pyro.sample(f"obs_{i}", pair.likelihood(z), obs=x[i])

    return Case(model, x)


def ragged_loop_of_plates(pair):
    x = pair.data((6,))

    def model():
        z = latent(pair, zero())
        for i, part in enumerate((x[:1], x[1:3], x[3:])):
            with pyro.plate(f"part_{i}", len(part)):
                pyro.sample(f"x_{i}", pair.likelihood(z), obs=part)

    return Case(model, x)


def plate_of_one(pair):
    x = pair.data((1,))

    def model():
        z = latent(pair, zero())
        with pyro.plate("data", 1):
            pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x)


def replicates_of_one(pair):
    x, k = pair.data((1, 1)), torch.ones(1)

    def model():
        with pyro.plate("k", 1, dim=-1):
            z = latent(pair, k)
            with pyro.plate("data", 1, dim=-2):
                pyro.sample("x", pair.likelihood(z), obs=x)

    return Case(model, x, k=k)


def no_plate_at_all(pair):
    x = pair.data(())

    def model():
        pyro.sample("x", pair.likelihood(latent(pair, zero())), obs=x)

    return Case(model, x)


def empty_event(pair):
    x = pair.data((0,))

    def model():
        z = latent(pair, zero())
        pyro.sample("x", pair.likelihood(z).expand([0]).to_event(1), obs=x)

    return Case(model, x)


def empty_loop(pair):
    x = pair.data((0,))

    def model():
        latent(pair, zero())
        for i in range(0):
            pyro.sample(f"obs_{i}", pair.likelihood(zero()), obs=x[i])

    return Case(model, x)


STRUCTURES = [
    plain_plate, data_in_a_closure, conditioned, nested_plates, latent_in_the_outer_plate,
    crossed_rows, crossed_columns, plates_far_to_the_left, replicates, replicates_in_two_plates,
    one_datum_each, data_to_event, data_to_event_in_a_plate, latent_to_event, latent_to_event_twice,
    latent_to_event_in_a_plate, expanded, expanded_by_the_plate, expanded_to_event,
    expanded_by_itself, indexed_by_group, indexed_by_rows_and_columns, masked, masked_in_two_plates,
    masked_distribution, masked_distribution_to_event, masked_all, masked_all_by_a_tensor, scaled,
    scaled_by_a_tensor, scaled_twice_and_masked, scaled_with_its_prior, scaled_prior_of_replicates,
    python_loop, python_loop_with_masks, sequential_plate, ragged_loop_of_plates, plate_of_one,
    replicates_of_one, no_plate_at_all, empty_event, empty_loop,
]  # fmt: skip
CORE = ("beta-binomial", "dirichlet-categorical", "dirichlet-multinomial", "gamma-poisson",
        "gamma-normal[tau.rsqrt()]", "inverse_gamma-normal[v.sqrt()]", "normal-normal[2 z - 1]",
        "mvn-normal")  # fmt: skip
"""One pair of each family and kind of data; the others skip structures that are like another one."""
LIKE_ANOTHER = [
    data_in_a_closure, conditioned, nested_plates, plates_far_to_the_left, replicates_in_two_plates,
    data_to_event_in_a_plate, latent_to_event_twice, latent_to_event_in_a_plate,
    expanded_by_the_plate, expanded_to_event, expanded_by_itself, indexed_by_rows_and_columns,
    masked_in_two_plates, masked_distribution_to_event, sequential_plate, replicates_of_one,
]  # fmt: skip
OF_SPELLINGS = [plain_plate, crossed_rows, latent_to_event, masked, scaled_by_a_tensor, expanded,
                data_to_event, python_loop]  # fmt: skip
OF_OPAQUE = [plain_plate, latent_to_event, python_loop]
DTYPES = [torch.float64, torch.float32]


def cases():
    """Canonical pairs in every structure, their spellings in some; some of it in float32 too."""
    for name in PAIRS:
        used = STRUCTURES if name in CANONICAL else OF_SPELLINGS[:5]
        if name not in CORE:
            used = [s for s in used if s not in LIKE_ANOTHER]
        for structure in OF_OPAQUE if name in OPAQUE_COVARIANCE else used:
            if structure is empty_event and name.startswith("mvn-mvn"):
                continue  # torch's MultivariateNormal has no log_prob of no rows
            short = name in CANONICAL and structure in OF_SPELLINGS
            for dtype in DTYPES if short or structure is plain_plate else DTYPES[:1]:
                label = f"{name}-{structure.__name__}-{dtype}".replace("torch.", "")
                yield pytest.param(name, structure, dtype, id=label)


@pytest.mark.parametrize("name", PAIRS)
def test_the_table_of_pairs_is_the_log_density(name):
    """log p(x | z) = <message(x), T(z)> + constant(x), at draws of z from the prior."""
    pair = PAIRS[name]
    x = pair.data((5,))
    for _ in range(3):
        z = pair.prior(zero()).sample()
        one = {
            "Beta": lambda z: (z.log(), torch.log1p(-z)),
            "Dirichlet": lambda z: (z.log(),),
            "Gamma": lambda z: (z.log(), z),
            "InverseGamma": lambda z: (z.log(), 1 / z),
            "Normal": lambda z: (z, z**2),
            "MultivariateNormal": lambda z: (z, torch.outer(z, z)),
        }[pair.family.name](z)
        expected = pair.constant(x)
        for m, t, e in zip(pair.message(x), one, pair.family.event_dims, strict=True):
            expected = expected + ((m * t).sum(tuple(range(-e, 0))) if e else m * t)
        close(pair.likelihood(z).log_prob(x), expected, torch.float64, "log density")


@pytest.mark.parametrize("name", PAIRS)
def test_means_of_families_are_gradients(name):
    """The closed forms of E T(z) are the gradient of the log-partition."""
    pair = PAIRS[name]
    natural = natural_of(pair.family, pair.prior(zero()))
    leaves = tuple(n.clone().requires_grad_() for n in natural)
    gradient = torch.autograd.grad(pair.family.log_partition(*leaves).sum(), leaves)
    for a, b in zip(pair.family.mean(natural), gradient, strict=True):
        close(a, b, torch.float64, "mean")


@pytest.mark.parametrize(("name", "structure", "dtype"), list(cases()), indirect=["dtype"])
def test_one_step_is_the_exact_posterior(name, structure, dtype):
    """Posterior, loss, and every edge of the report; a second step changes nothing."""
    pair = PAIRS[name]
    case = structure(pair)
    prior = (
        case.prior if case.prior is not None else pair.prior(zero() if case.k is None else case.k)
    )
    batch = tuple(prior.batch_shape)
    expected, elbo = exact_posterior(
        pair, natural_of(pair.family, prior), case.x, case.weight, batch, case.scale
    )
    guide, cvi, losses = fitted(case.model, *case.args)
    assert hows(cvi) == {"exact"}, cvi.explain()
    check_posterior(guide, "z", pair.family, expected, dtype)
    close(-losses[0], elbo, dtype, "the bound")
    if structure in OF_SPELLINGS:
        close(-cvi.evaluate_loss(*case.args), elbo, dtype, "evaluate_loss")
        cvi.step(*case.args)
        check_posterior(guide, "z", pair.family, expected, dtype)


# --- cells with constants of their own --------------------------------------------------------------

C = torch.tensor([0.5, 2.0, 1.0, 4.0])
X = torch.tensor([1.0, 3.0, 0.0, 2.0])
V = torch.tensor([0.5, 1.5, 2.0, 0.25])
OWN = {
    "Poisson(z * exposure)": (lambda z, c: dist.Poisson(z * c), X, "gamma", X, -C),
    "Poisson(exposure / v)": (lambda v, c: dist.Poisson(c / v), X, "inverse", -X, -C),
    "Exponential(z * c)": (lambda z, c: dist.Exponential(z * c), V, "gamma", 1 + 0 * C, -C * V),
    "Gamma(c, z)": (lambda z, c: dist.Gamma(c, z), V, "gamma", C, -V),
    "Gamma(c, z / c)": (lambda z, c: dist.Gamma(c, z / c), V, "gamma", C, -V / C),
    "InverseGamma(c, z)": (lambda z, c: dist.InverseGamma(c, z), V, "gamma", C, -1 / V),
    "Normal(c, (tau * c).rsqrt())": (
        lambda t, c: dist.Normal(c, (t * c).rsqrt()), X, "gamma", 0.5 + 0 * C,
        -0.5 * C * (X - C) ** 2,
    ),
    "Normal(c, c * tau.rsqrt())": (
        lambda t, c: dist.Normal(c, c * t.rsqrt()), X, "gamma", 0.5 + 0 * C,
        -0.5 * (X - C) ** 2 / C**2,
    ),
    "Normal(c, c / tau.sqrt())": (
        lambda t, c: dist.Normal(c, c / t.sqrt()), X, "gamma", 0.5 + 0 * C,
        -0.5 * (X - C) ** 2 / C**2,
    ),
    "Normal(c, (c / tau).sqrt())": (
        lambda t, c: dist.Normal(c, (c / t).sqrt()), X, "gamma", 0.5 + 0 * C,
        -0.5 * (X - C) ** 2 / C,
    ),
    "Normal(c, (v * c).sqrt())": (
        lambda v, c: dist.Normal(c, (v * c).sqrt()), X, "inverse", -0.5 + 0 * C,
        -0.5 * (X - C) ** 2 / C,
    ),
    "LogNormal(c, (tau * c).rsqrt())": (
        lambda t, c: dist.LogNormal(c, (t * c).rsqrt()), V, "gamma", 0.5 + 0 * C,
        -0.5 * C * (V.log() - C) ** 2,
    ),
    "Binomial(n, p)": (lambda p, c: dist.Binomial(2 * c + 4, p), X, "beta", X, 2 * C + 4 - X),
    "NegativeBinomial(r, p)": (lambda p, c: dist.NegativeBinomial(c, p), X, "beta", X, C),
}  # fmt: skip
PRIORS = {"gamma": (GAMMA, dist.Gamma), "inverse": (INVERSE_GAMMA, dist.InverseGamma),
          "beta": (BETA, dist.Beta)}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_cells_with_constants_of_their_own(name, dtype):
    """Exposures, weights and counts that differ between the cells."""
    likelihood, x, kind, first, second = OWN[name]
    family, prior = PRIORS[kind]
    c, x = C.to(dtype), x.to(dtype)

    def model():
        z = pyro.sample("z", prior(2.5, 3.0))
        with pyro.plate("data", 4):
            pyro.sample("x", likelihood(z, c), obs=x)

    a, b = natural_of(family, prior(torch.tensor(2.5), torch.tensor(3.0)))
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    expected = (a + first.double().sum(), b + second.double().sum())
    check_posterior(guide, "z", family, expected, dtype)
    # Bayes at one point: log p(x) = log p(x | z) + log p(z) - log q(z)
    z = torch.tensor(0.625, dtype=torch.float64)
    first, second = expected
    concentrations = {
        "gamma": (first + 1, -second),
        "beta": (first + 1, second + 1),
        "inverse": (-first - 1, -second),
    }[kind]
    evidence = (
        likelihood(z, c.double()).log_prob(x.double()).sum()
        + prior(torch.tensor(2.5).double(), torch.tensor(3.0).double()).log_prob(z)
        - prior(*concentrations).log_prob(z)
    )
    close(-losses[0], evidence, dtype, "log evidence")


@pytest.mark.parametrize("kind", ["several likelihoods", "several sites of data"])
def test_likelihoods_of_one_latent_add_up(kind, dtype):
    """A Gamma that is a Poisson rate, an Exponential rate and a precision at once."""
    x, y, v = tensor([1.0, 3.0, 2.0]), tensor([0.5, 2.0]), tensor([1.0, -1.5, 0.25])

    def model():
        z = pyro.sample("z", dist.Gamma(2.0, 1.5))
        with pyro.plate("counts", 3):
            pyro.sample("x", dist.Poisson(z), obs=x)
        with pyro.plate("times", 2):
            pyro.sample("y", dist.Exponential(z), obs=y)
        if kind == "several likelihoods":
            with pyro.plate("values", 3):
                pyro.sample("v", dist.Normal(0.0, z.rsqrt()), obs=v)
        else:
            for i in range(3):
                pyro.sample(f"v_{i}", dist.Normal(0.0, 1 / z.sqrt()), obs=v[i])

    a, b = 2 + 6 + 2 + 1.5, 1.5 + 3 + 2.5 + 0.5 * float(v.square().sum())
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    check_posterior(
        guide, "z", GAMMA, (torch.tensor(a - 1).double(), torch.tensor(-b).double()), dtype
    )
    z = torch.tensor(0.75, dtype=torch.float64)
    evidence = (
        dist.Poisson(z).log_prob(x.double()).sum()
        + dist.Exponential(z).log_prob(y.double()).sum()
        + dist.Normal(0.0, z.rsqrt()).log_prob(v.double()).sum()
        + dist.Gamma(torch.tensor(2.0).double(), torch.tensor(1.5).double()).log_prob(z)
        - dist.Gamma(torch.tensor(a).double(), torch.tensor(b).double()).log_prob(z)
    )
    close(-losses[0], evidence, dtype, "log evidence")
