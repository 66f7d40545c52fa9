"""Conjugate models of several continuous blocks, each with its expected log joint written by hand."""

import math

import pyro
import pyro.distributions as dist
import torch
from cavi_cases import (
    EXAMPLES,
    Block,
    Example,
    counts,
    example,
    gamma,
    gammas,
    gaussian,
    index,
    inverse_gamma,
    normal,
    numbers,
    one_hot,
)
from pair_cases import GAMMA, INVERSE_GAMMA
from pyro import poutine

# --- location and noise, in every structure -------------------------------------------------------

NOISES = {
    "gamma rsqrt": lambda m, t: dist.Normal(m, t.rsqrt()),
    "gamma 1 / sqrt": lambda m, t: dist.Normal(m, 1 / t.sqrt()),
    "gamma power": lambda m, t: dist.Normal(m, t**-0.5),
    "inverse gamma sqrt": lambda m, v: dist.Normal(m, v.sqrt()),
    "inverse gamma power": lambda m, v: dist.Normal(m, v**0.5),
    "gamma log normal": lambda m, t: dist.LogNormal(m, t.rsqrt()),
}


class Cells:
    """Cells y_n ~ Normal(m[i_n], 1 / t[j_n]) with weights w_n; m and t have priors scaled by s."""

    def __init__(self, model, y, i=None, j=None, w=1.0, m=(), t=(), s=1.0):
        n = y.numel()
        self.model, self.y, self.s = model, y, s
        self.i = torch.zeros(n, dtype=torch.long) if i is None else i.reshape(-1)
        self.j = torch.zeros(n, dtype=torch.long) if j is None else j.reshape(-1)
        self.w = torch.as_tensor(w, dtype=torch.float64).expand(y.shape).reshape(-1)
        self.m, self.t = m, t


def _plain(loc, noise, likelihood, numbers):
    y = numbers(7) + 1

    def model():
        m, t = loc(), noise()
        with pyro.plate("data", 7):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y)


def _nested(loc, noise, likelihood, numbers):
    y = numbers(3, 4)

    def model():
        m, t = loc(), noise()
        with pyro.plate("outer", 3, dim=-2), pyro.plate("inner", 4, dim=-1):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y)


def _event(loc, noise, likelihood, numbers):
    y = numbers(7)

    def model():
        pyro.sample("y", likelihood(loc(), noise()).expand([7]).to_event(1), obs=y)

    return Cells(model, y)


def _masked(loc, noise, likelihood, numbers):
    y = numbers(7)
    keep = torch.tensor([True, True, False, True, True, False, True])
    y[~keep] = float("nan")

    def model():
        m, t = loc(), noise()
        with pyro.plate("data", 7), poutine.mask(mask=keep):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, torch.nan_to_num(y, nan=1.0), w=keep.double())


def _scaled(loc, noise, likelihood, numbers):
    y, s = numbers(7), torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0, 1.0, 1.5])

    def model():
        m, t = loc(), noise()
        with pyro.plate("data", 7), poutine.scale(scale=s):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y, w=s)


def _scaled_with_priors(loc, noise, likelihood, numbers):
    y = numbers(7)

    def model():
        m, t = loc(), noise()
        with pyro.plate("data", 7):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(poutine.scale(model, scale=1.5), y, w=1.5, s=1.5)


def _loop(loc, noise, likelihood, numbers):
    y = numbers(7)

    def model():
        m, t = loc(), noise()
        for n in range(7):
            pyro.sample(f"obs_{n}", likelihood(m, t), obs=y[n])

    return Cells(model, y)


def _one(loc, noise, likelihood, numbers):
    y = numbers(1) + 1

    def model():
        m, t = loc(), noise()
        with pyro.plate("data", 1):
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y)


def _replicates(loc, noise, likelihood, numbers):
    y = numbers(4, 3)

    def model():
        with pyro.plate("k", 3, dim=-1):
            m, t = loc(), noise()
            with pyro.plate("data", 4, dim=-2):
                pyro.sample("y", likelihood(m, t), obs=y)

    k = index((4, 3), 1)
    return Cells(model, y, k, k, m=(3,), t=(3,))


def _vectors(loc, noise, likelihood, numbers):
    y = numbers(4, 3)

    def model():
        m, t = loc((3,)), noise((3,))
        with pyro.plate("data", 4):
            pyro.sample("y", likelihood(m, t).to_event(1), obs=y)

    k = index((4, 3), 1)
    return Cells(model, y, k, k, m=(3,), t=(3,))


def _a_location_per_row(loc, noise, likelihood, numbers):
    y = numbers(3, 4)

    def model():
        t = noise()
        with pyro.plate("rows", 3, dim=-2):
            m = loc()
            with pyro.plate("columns", 4, dim=-1):
                pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y, i=index((3, 4), 0), m=(3,))


def _a_noise_per_column(loc, noise, likelihood, numbers):
    y = numbers(4, 3)

    def model():
        m = loc()
        with pyro.plate("columns", 3, dim=-1):
            t = noise()
            with pyro.plate("rows", 4, dim=-2):
                pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y, j=index((4, 3), 1), t=(3,))


def _crossed(loc, noise, likelihood, numbers):
    y = numbers(4, 3)

    def model():
        rows, columns = pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 3, dim=-1)
        with rows:
            m = loc()
        with columns:
            t = noise()
        with rows, columns:
            pyro.sample("y", likelihood(m, t), obs=y)

    return Cells(model, y, index((4, 3), 0), index((4, 3), 1), m=(4,), t=(3,))


def _groups(loc, noise, likelihood, numbers):
    y, group = numbers(9), torch.arange(9) % 3
    kind = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0])

    def model():
        with pyro.plate("groups", 3):
            m = loc()
        with pyro.plate("kinds", 2):
            t = noise()
        with pyro.plate("data", 9):
            pyro.sample("y", likelihood(m[group], t[kind]), obs=y)

    return Cells(model, y, group, kind, m=(3,), t=(2,))


STRUCTURES = {f.__name__[1:]: f for f in (
    _plain, _nested, _event, _masked, _scaled, _scaled_with_priors, _loop, _one, _replicates,
    _vectors, _a_location_per_row, _a_noise_per_column, _crossed, _groups,
)}  # fmt: skip


def location_and_noise(structure, noise):
    """y ~ Normal(m, noise) with m ~ Normal(1/2, 2) and a Gamma precision or inverse Gamma variance."""
    inverse, log = noise.startswith("inverse"), noise.endswith("log normal")
    prior = dist.InverseGamma if inverse else dist.Gamma
    a, b = (3.0, 2.0) if inverse else (2.0, 1.5)

    def expanded(d, event):
        return d.expand(event).to_event(1) if event else d

    def loc(event=()):
        return pyro.sample("m", expanded(dist.Normal(0.5, 2.0), event))

    def scale(event=()):
        return pyro.sample("t", expanded(prior(a, b), event))

    def likelihood(m, t):
        return NOISES[noise](m, t)

    make = (lambda *shape: numbers(*shape).exp()) if log else numbers
    c = STRUCTURES[structure](loc, scale, likelihood, make)
    y = c.y.double().reshape(-1)
    if log:
        y = y.log()
    return _cells_example(c, inverse, a, b, y, -(c.w * y).sum() if log else 0.0)


def _cells_example(c, inverse, a, b, y, jacobian):
    n_m, n_t = math.prod(c.m), math.prod(c.t)
    pick, which = one_hot(c.i, n_m), c.j

    def expected(m):
        log_t = m.log("t").reshape(-1)
        t = (m.reciprocal("t") if inverse else m.mean("t")).reshape(-1)
        log_p = -log_t if inverse else log_t
        prior = inverse_gamma if inverse else gamma
        return (
            c.s * normal(m.square(-0.5, m=1.0), sd=2.0)
            + c.s * prior(log_t, t, a, b)
            + normal(m.square(y, m=-pick), t[which], log_p[which], weight=c.w)
            + jacobian
        )

    family = INVERSE_GAMMA if inverse else GAMMA
    return Example(c.model, [gaussian(m=(n_m,)), Block(family, {"t": (n_t,)})], expected)


def _register_locations():
    for structure in STRUCTURES:
        for noise in NOISES:
            if noise in ("gamma rsqrt", "inverse gamma sqrt") or structure == "groups":
                EXAMPLES[f"{structure}, {noise}"] = (
                    lambda s=structure, n=noise: location_and_noise(s, n)
                )  # fmt: skip


_register_locations()
LOCATIONS = frozenset(EXAMPLES)


# --- regressions and random effects ----------------------------------------------------------------


@example
def regression_with_unknown_noise():
    x, y = numbers(12, 3, seed=1), numbers(12, seed=2)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)

    def expected(m):
        return (
            normal(m.square(0.0, w=1.0), sd=2.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + normal(m.square(y, w=-x), m.mean("tau"), m.log("tau"))
        )

    return Example(model, [gaussian(w=(3,)), gammas("tau")], expected)


@example
def regression_with_a_precision_per_row_weight():
    """Known relative precisions: Normal(x w, (tau * weight).rsqrt())."""
    x, y = numbers(12, 2, seed=1), numbers(12, seed=2)
    c = torch.tensor([0.5, 1.0, 2.0] * 4)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(x @ w, (tau * c).rsqrt()), obs=y)

    def expected(m):
        d = c.double()
        return (
            normal(m.square(0.0, w=1.0), sd=2.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + normal(m.square(y, w=-x), d * m.mean("tau"), d.log() + m.log("tau"))
        )

    return Example(model, [gaussian(w=(2,)), gammas("tau")], expected)


@example
def regression_with_shrinkage_per_weight():
    """Automatic relevance determination: a Gamma precision for each weight."""
    x, y = numbers(12, 3, seed=1), numbers(12, seed=2)

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        alpha = pyro.sample("alpha", dist.Gamma(1.5, 1.0).expand([3]).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), alpha.rsqrt()).to_event(1))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)

    def expected(m):
        return (
            gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + gamma(m.log("alpha"), m.mean("alpha"), 1.5, 1.0)
            + normal(m.square(0.0, w=1.0), m.mean("alpha"), m.log("alpha"))
            + normal(m.square(y, w=-x), m.mean("tau"), m.log("tau"))
        )

    return Example(model, [gammas("tau"), gammas("alpha", 3), gaussian(w=(3,))], expected)


@example
def normal_gamma_prior_of_the_weights():
    """The g-prior: weights whose scale is that of the noise."""
    x, y = numbers(12, 3, seed=1), numbers(12, seed=2)

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2 * tau.rsqrt()).to_event(1))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)

    def expected(m):
        t, log_t = m.mean("tau"), m.log("tau")
        return (
            gamma(log_t, t, 2.0, 1.0)
            + normal(m.square(0.0, w=1.0), t / 4, log_t - math.log(4))
            + normal(m.square(y, w=-x), t, log_t)
        )

    return Example(model, [gammas("tau"), gaussian(w=(3,))], expected)


@example
def several_outputs_with_a_noise_each():
    """Y ~ Normal(X W, tau_d): a matrix of weights, a precision per column."""
    x, y = numbers(10, 2, seed=1), numbers(10, 3, seed=2)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", 10):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()).to_event(1), obs=y)

    def expected(m):
        design = torch.einsum("nk,de->ndke", x.double(), torch.eye(3).double())  # n, d, k, e
        square = m.square(y.double().reshape(-1), w=-design.reshape(30, 6)).reshape(10, 3)
        return (
            normal(m.square(0.0, w=1.0), sd=1.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + normal(square, m.mean("tau"), m.log("tau"))
        )

    return Example(model, [gaussian(w=(2, 3)), gammas("tau", 3)], expected)


@example
def random_intercepts_and_slopes():
    """The regression of the README: a slope, an effect per group of unknown precision, noise."""
    x, y, group = numbers(12, seed=1), numbers(12, seed=2), torch.arange(12) % 4

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
        with pyro.plate("groups", 4):
            effect = pyro.sample("effect", dist.Normal(0.0, tau.rsqrt()))
        with pyro.plate("rows", 12):
            mean = slope * x + effect[group]
            pyro.sample("y", dist.Normal(mean, noise.rsqrt()), obs=y)

    def expected(m):
        return (
            gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + gamma(m.log("noise"), m.mean("noise"), 2.0, 1.0)
            + normal(m.square(0.0, slope=1.0), sd=5.0)
            + normal(m.square(0.0, effect=1.0), m.mean("tau"), m.log("tau"))
            + normal(
                m.square(y, slope=-x.unsqueeze(-1), effect=-one_hot(group, 4)),
                m.mean("noise"),
                m.log("noise"),
            )
        )

    blocks = [gammas("tau"), gammas("noise"), gaussian(slope=(), effect=(4,))]
    return Example(model, blocks, expected)


@example
def crossed_random_effects():
    """y_ij ~ Normal(mu + a_i + b_j, noise) in crossed plates, a precision for each kind of effect."""
    y = numbers(4, 3, seed=2)

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        t_a, t_b = (
            pyro.sample("t_a", dist.Gamma(2.0, 1.0)),
            pyro.sample("t_b", dist.Gamma(3.0, 1.0)),
        )
        noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
        rows, columns = pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 3, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Normal(0.0, t_a.rsqrt()))
        with columns:
            b = pyro.sample("b", dist.Normal(0.0, 1 / t_b.sqrt()))
        with rows, columns:
            pyro.sample("y", dist.Normal(mu + a + b, noise**-0.5), obs=y)

    def expected(m):
        i, j = index((4, 3), 0).reshape(-1), index((4, 3), 1).reshape(-1)
        square = m.square(
            y.double().reshape(-1), mu=-torch.ones(12, 1), a=-one_hot(i, 4), b=-one_hot(j, 3)
        )
        return (
            normal(m.square(0.0, mu=1.0), sd=3.0)
            + gamma(m.log("t_a"), m.mean("t_a"), 2.0, 1.0)
            + gamma(m.log("t_b"), m.mean("t_b"), 3.0, 1.0)
            + gamma(m.log("noise"), m.mean("noise"), 2.0, 1.0)
            + normal(m.square(0.0, a=1.0), m.mean("t_a"), m.log("t_a"))
            + normal(m.square(0.0, b=1.0), m.mean("t_b"), m.log("t_b"))
            + normal(square, m.mean("noise"), m.log("noise"))
        )

    blocks = [gammas("t_a"), gammas("t_b"), gammas("noise"), gaussian(mu=(), a=(4,), b=(3,))]
    return Example(model, blocks, expected)


# --- chains mu -> m_j -> m_jk -> y -----------------------------------------------------------------


def chain(levels, looped=False):
    """Depth 4, with a noise at each of the three levels that is known, Gamma or inverse Gamma."""
    y = numbers(2, 3, 4, seed=3) + 1
    names, sds = ("p1", "p2", "p3"), (1.5, 1.0, 0.5)

    def scale(level):
        kind, name = levels[level], names[level]
        if kind == "known":
            return torch.tensor(sds[level])
        if kind == "gamma":
            return pyro.sample(name, dist.Gamma(2.0 + level, 1.5)).rsqrt()
        return pyro.sample(name, dist.InverseGamma(3.0 + level, 2.0)).sqrt()

    def plates():
        mu = pyro.sample("mu", dist.Normal(0.5, 2.0))
        s1, s2, s3 = scale(0), scale(1), scale(2)
        with pyro.plate("j", 2, dim=-3):
            m1 = pyro.sample("m1", dist.Normal(mu, s1))
            with pyro.plate("k", 3, dim=-2):
                m2 = pyro.sample("m2", dist.Normal(m1, s2))
                with pyro.plate("l", 4, dim=-1):
                    pyro.sample("y", dist.Normal(m2, s3), obs=y)

    def loops():
        mu = pyro.sample("mu", dist.Normal(0.5, 2.0))
        s1, s2, s3 = scale(0), scale(1), scale(2)
        for j in range(2):
            m1 = pyro.sample(f"m1_{j}", dist.Normal(mu, s1))
            for k in range(3):
                m2 = pyro.sample(f"m2_{j}{k}", dist.Normal(m1, s2))
                with pyro.plate(f"l_{j}{k}", 4):
                    pyro.sample(f"y_{j}{k}", dist.Normal(m2, s3), obs=y[j, k])

    j_of_k = torch.arange(6) // 3
    k_of_l = torch.arange(24) // 4

    def square(m, const, child, i, parent, k):
        """E (const + child_i - parent_k)^2, whichever way the sites are written."""
        designs = {}
        for name, idx, sign in ((child, i, 1.0), (parent, k, -1.0)):
            if name is None:
                continue
            d = sign * one_hot(idx, {"mu": 1, "m1": 2, "m2": 6}[name])
            if looped and name != "mu":
                labels = ["0", "1"] if name == "m1" else [f"{a}{b}" for a in "01" for b in "012"]
                designs |= {f"{name}_{t}": d[:, [c]] for c, t in enumerate(labels)}
            else:
                designs[name] = d
        return m.square(const, **designs)

    def level(m, level, sq):
        kind, name = levels[level], names[level]
        if kind == "known":
            return normal(sq, sd=sds[level])
        if kind == "gamma":
            return normal(sq, m.mean(name), m.log(name)) + gamma(
                m.log(name), m.mean(name), 2.0 + level, 1.5
            )
        return normal(sq, m.reciprocal(name), -m.log(name)) + inverse_gamma(
            m.log(name), m.reciprocal(name), 3.0 + level, 2.0
        )

    def expected(m):
        zero = torch.zeros(6, dtype=torch.long)
        return (
            normal(m.square(-0.5, mu=1.0), sd=2.0)
            + level(m, 0, square(m, 0.0, "m1", torch.arange(2), "mu", zero[:2]))
            + level(m, 1, square(m, 0.0, "m2", torch.arange(6), "m1", j_of_k))
            + level(m, 2, square(m, y.double().reshape(-1), None, None, "m2", k_of_l))
        )

    if looped:
        sites = {"mu": (), **{f"m1_{j}": () for j in range(2)}}
        sites |= {f"m2_{j}{k}": () for j in range(2) for k in range(3)}
    else:
        sites = {"mu": (), "m1": (2,), "m2": (6,)}
    families = {"gamma": GAMMA, "inverse gamma": INVERSE_GAMMA}
    scales = [
        Block(families[k], {n: ()}) for k, n in zip(levels, names, strict=True) if k != "known"
    ]
    return Example(loops if looped else plates, [*scales, gaussian(**sites)], expected)


def _register_chains():
    for name, levels in {
        "known": ("known",) * 3,
        "gamma": ("gamma",) * 3,
        "inverse gamma": ("inverse gamma",) * 3,
        "mixed": ("gamma", "known", "inverse gamma"),
    }.items():
        EXAMPLES[f"chain, {name}"] = lambda v=levels: chain(v)
        if name in ("known", "gamma"):
            EXAMPLES[f"chain in loops, {name}"] = lambda v=levels: chain(v, looped=True)


_register_chains()


@example
def random_walk_with_two_precisions():
    y = numbers(6, seed=4).cumsum(0)

    def model():
        q, r = pyro.sample("q", dist.Gamma(3.0, 2.0)), pyro.sample("r", dist.Gamma(3.0, 1.0))
        x = pyro.sample("x_0", dist.Normal(0.0, 1.0))
        for t in range(6):
            x = pyro.sample(f"x_{t + 1}", dist.Normal(0.5 * x + 0.25, q.rsqrt()))
            pyro.sample(f"y_{t}", dist.Normal(2 * x, r.rsqrt()), obs=y[t])

    def expected(m):
        total = (
            gamma(m.log("q"), m.mean("q"), 3.0, 2.0)
            + gamma(m.log("r"), m.mean("r"), 3.0, 1.0)
            + normal(m.square(0.0, x_0=1.0), sd=1.0)
        )
        for t in range(6):
            step = m.square(-0.25, **{f"x_{t + 1}": 1.0, f"x_{t}": -0.5})
            read = m.square(y[t].double(), **{f"x_{t + 1}": -2.0})
            total = total + normal(step, m.mean("q"), m.log("q"))
            total = total + normal(read, m.mean("r"), m.log("r"))
        return total

    blocks = [gammas("q"), gammas("r"), gaussian(**{f"x_{t}": () for t in range(7)})]
    return Example(model, blocks, expected)


# --- Gammas over Gammas ----------------------------------------------------------------------------


@example
def gamma_rate_of_gammas_of_counts():
    x = counts(5)

    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("cells", 5):
            z = pyro.sample("z", dist.Gamma(2.0, rate))
            pyro.sample("x", dist.Poisson(3 * z), obs=x)

    def expected(m):
        z, log_z = m.mean("z"), m.log("z")
        likelihood = x.double() * (log_z + math.log(3)) - 3 * z - torch.lgamma(x.double() + 1)
        return (
            gamma(m.log("rate"), m.mean("rate"), 2.0, 1.0)
            + gamma(log_z, z, 2.0, m.mean("rate"), m.log("rate"))
            + likelihood.sum()
        )

    return Example(model, [gammas("rate"), gammas("z", 5)], expected)


@example
def product_of_two_precisions():
    y = numbers(4, 3, seed=5)

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", 4, dim=-2):
            lam = pyro.sample("lam", dist.Gamma(2.0, 2.0))
            with pyro.plate("columns", 3, dim=-1):
                pyro.sample("y", dist.Normal(0.0, (tau * lam).rsqrt()), obs=y)

    def expected(m):
        tau, lam = m.mean("tau"), m.mean("lam").unsqueeze(-1)
        log_p = m.log("tau") + m.log("lam").unsqueeze(-1)
        return (
            gamma(m.log("tau"), tau, 2.0, 1.0)
            + gamma(m.log("lam"), m.mean("lam"), 2.0, 2.0)
            + normal(y.double() ** 2, tau * lam, log_p)
        )

    return Example(model, [gammas("tau"), gammas("lam", 4)], expected)


@example
def student_noise_as_a_scale_mixture():
    """y ~ Normal(m, (tau w_n)^-1/2), w_n ~ Gamma(nu / 2, nu / 2)."""
    y = numbers(8, seed=5)

    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 8):
            w = pyro.sample("w", dist.Gamma(2.0, 2.0))
            pyro.sample("y", dist.Normal(loc, (tau * w).rsqrt()), obs=y)

    def expected(m):
        square = m.square(y, loc=-torch.ones(8, 1))
        return (
            normal(m.square(0.0, loc=1.0), sd=2.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + gamma(m.log("w"), m.mean("w"), 2.0, 2.0)
            + normal(square, m.mean("tau") * m.mean("w"), m.log("tau") + m.log("w"))
        )

    return Example(model, [gaussian(loc=()), gammas("tau"), gammas("w", 8)], expected)


@example
def poisson_of_a_product_of_gammas():
    """counts_ij ~ Poisson(a_i b_j) in crossed plates."""
    x = counts(3, 4, seed=2) + torch.eye(3, 4)

    def model():
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Gamma(2.0, 1.0))
        with columns:
            b = pyro.sample("b", dist.Gamma(3.0, 2.0))
        with rows, columns:
            pyro.sample("x", dist.Poisson(a * b), obs=x)

    def expected(m):
        a, b = m.mean("a").unsqueeze(-1), m.mean("b")
        log_rate = m.log("a").unsqueeze(-1) + m.log("b")
        d = x.double()
        return (
            gamma(m.log("a"), m.mean("a"), 2.0, 1.0)
            + gamma(m.log("b"), b, 3.0, 2.0)
            + (d * log_rate - a * b - torch.lgamma(d + 1)).sum()
        )

    return Example(model, [gammas("a", 3), gammas("b", 4)], expected)


@example
def gamma_precision_of_a_gamma_scale_mixture_of_effects():
    """A hierarchy of precisions: b ~ Gamma, tau_g ~ Gamma(2, b), y ~ Normal(0, tau_g)."""
    y = numbers(3, 4, seed=6)

    def model():
        b = pyro.sample("b", dist.Gamma(2.0, 1.0))
        with pyro.plate("groups", 3, dim=-2):
            tau = pyro.sample("tau", dist.Gamma(2.0, b))
            with pyro.plate("data", 4, dim=-1):
                pyro.sample("y", dist.Normal(0.0, tau.rsqrt()), obs=y)

    def expected(m):
        return (
            gamma(m.log("b"), m.mean("b"), 2.0, 1.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, m.mean("b"), m.log("b"))
            + normal(y.double() ** 2, m.mean("tau").unsqueeze(-1), m.log("tau").unsqueeze(-1))
        )

    return Example(model, [gammas("b"), gammas("tau", 3)], expected)


# --- products of Gaussian sites --------------------------------------------------------------------


def product_square(m, y, left, right, n, k):
    """E (y_ij - sum_k left_ik right_jk)^2, (n, d), for independent left and right."""
    y = y.double()
    d = y.shape[1]
    a, b = m.mean(left).reshape(n, k), m.mean(right).reshape(d, k)
    aa = torch.stack([m.outer(left, left).reshape(n, k, n, k)[i, :, i] for i in range(n)])
    bb = torch.stack([m.outer(right, right).reshape(d, k, d, k)[j, :, j] for j in range(d)])
    return y**2 - 2 * y * (a @ b.T) + torch.einsum("ikl,jkl->ij", aa, bb)


def factors(noise, relevance=False, spelling="z @ W.T"):
    """y_n ~ Normal(z_n W^T, noise): factor analysis, or probabilistic PCA with a Gamma precision."""
    n, d, k = 6, 4, 2
    y = numbers(n, d, seed=8)

    def mean(z, w):
        if spelling == "z @ W.T":
            return z @ w.T
        if spelling == "einsum":
            return torch.einsum("nk,dk->nd", z, w)
        if spelling == "sum":
            return (z.unsqueeze(-2) * w).sum(-1)
        return torch.matmul(w, z.unsqueeze(-1)).squeeze(-1)

    def model():
        if noise == "known":
            sd = torch.tensor([0.5, 1.0, 0.75, 1.5])
        elif noise == "shared":
            sd = pyro.sample("tau", dist.Gamma(3.0, 1.0)).rsqrt()
        else:
            sd = pyro.sample("tau", dist.Gamma(3.0, 1.0).expand([d]).to_event(1)).rsqrt()
        scale = torch.ones(k)
        if relevance:
            scale = pyro.sample("alpha", dist.Gamma(2.0, 1.0).expand([k]).to_event(1)).rsqrt()
        w = pyro.sample("W", dist.Normal(torch.zeros(d, k), scale).to_event(2))
        with pyro.plate("rows", n):
            z = pyro.sample("z", dist.Normal(torch.zeros(k), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(mean(z, w), sd).to_event(1), obs=y)

    def expected(m):
        square = product_square(m, y, "z", "W", n, k)
        total = normal(m.square(0.0, z=1.0), sd=1.0)
        if noise == "known":
            total = total + normal(square, sd=[0.5, 1.0, 0.75, 1.5])
        else:
            total = total + normal(square, m.mean("tau"), m.log("tau"))
            total = total + gamma(m.log("tau"), m.mean("tau"), 3.0, 1.0)
        of_w = m.square(0.0, W=1.0).reshape(d, k)
        if relevance:
            total = total + gamma(m.log("alpha"), m.mean("alpha"), 2.0, 1.0)
            return total + normal(of_w, m.mean("alpha"), m.log("alpha"))
        return total + normal(of_w, sd=1.0)

    blocks = [gaussian(W=(d, k)), gaussian(z=(n, k))]
    if relevance:
        blocks.insert(0, gammas("alpha", k))
    if noise != "known":
        blocks.insert(0, gammas("tau") if noise == "shared" else gammas("tau", d))
    return Example(model, blocks, expected, free=True)


EXAMPLES |= {
    "factor analysis, z @ W.T": lambda: factors("known"),
    "factor analysis, einsum": lambda: factors("known", spelling="einsum"),
    "factor analysis, sum": lambda: factors("known", spelling="sum"),
    "factor analysis, W @ z": lambda: factors("known", spelling="W @ z"),
    "factor analysis, a precision per column": lambda: factors("columns"),
    "probabilistic PCA": lambda: factors("shared"),
    "Bayesian PCA": lambda: factors("shared", relevance=True),
}


def ratings():
    """y_n ~ Normal(u[i] . v[j] , tau): matrix factorisation."""
    n, rows, columns, k = 14, 4, 3, 2
    i, j, y = torch.arange(n) % rows, (torch.arange(n) * 2 // 3) % columns, numbers(n, seed=9)

    def model():
        tau = pyro.sample("tau", dist.Gamma(3.0, 1.0))
        with pyro.plate("rows", rows):
            u = pyro.sample("u", dist.Normal(torch.zeros(k), 1.0).to_event(1))
        with pyro.plate("columns", columns):
            v = pyro.sample("v", dist.Normal(torch.zeros(k), 1.0).to_event(1))
        mean = (u[i] * v[j]).sum(-1)
        with pyro.plate("data", n):
            pyro.sample("y", dist.Normal(mean, tau.rsqrt()), obs=y)

    def expected(m):
        square = product_square(m, torch.zeros(rows, columns), "u", "v", rows, k)[i, j]
        cross = (m.mean("u")[i] * m.mean("v")[j]).sum(-1)
        d = y.double()
        return (
            gamma(m.log("tau"), m.mean("tau"), 3.0, 1.0)
            + normal(m.square(0.0, u=1.0), sd=1.0)
            + normal(m.square(0.0, v=1.0), sd=1.0)
            + normal(d**2 - 2 * d * cross + square, m.mean("tau"), m.log("tau"))
        )

    blocks = [gammas("tau"), gaussian(u=(rows, k)), gaussian(v=(columns, k))]
    return Example(model, blocks, expected, free=True)


@example
def bilinear_random_effects():
    """y_ij ~ Normal(a_i b_j, tau) with b around 1: an effect and its multiplier, in crossed plates."""
    y = numbers(4, 3, seed=10) + 2

    def model():
        tau = pyro.sample("tau", dist.Gamma(3.0, 1.0))
        rows, columns = pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 3, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with columns:
            b = pyro.sample("b", dist.Normal(1.0, 0.25))
        with rows, columns:
            pyro.sample("y", dist.Normal(a * b, tau.rsqrt()), obs=y)

    def expected(m):
        square = product_square(m, y, "a", "b", 4, 1)
        return (
            gamma(m.log("tau"), m.mean("tau"), 3.0, 1.0)
            + normal(m.square(0.0, a=1.0), sd=2.0)
            + normal(m.square(-1.0, b=1.0), sd=0.25)
            + normal(square, m.mean("tau"), m.log("tau"))
        )

    init = {"a": torch.full((4, 1), 2.0), "b": torch.ones(3)}
    return Example(model, [gammas("tau"), gaussian(a=(4,)), gaussian(b=(3,))], expected, init=init)


@example
def a_scalar_scale_of_effects():
    """y ~ Normal(mu + s * eta_j, 1 / 2): effects in their non-centred form, s Gaussian around 1."""
    y = numbers(5, 3, seed=11) + 1

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        s = pyro.sample("s", dist.Normal(1.0, 0.25))
        with pyro.plate("j", 5, dim=-2):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            with pyro.plate("data", 3, dim=-1):
                pyro.sample("y", dist.Normal(mu + s * eta, 0.5), obs=y)

    def expected(m):
        # E (y - mu - s eta)^2 = E (y - mu)^2 - 2 E (y - mu) s eta + E s^2 E eta^2
        j = index((5, 3), 0).reshape(-1)
        d = y.double().reshape(-1)
        ones = torch.ones(15, dtype=torch.float64)
        alone = m.square(d, mu=-ones.unsqueeze(-1))
        cross = (d * m.mean("s") - m.outer("mu", "s")[0, 0]) * m.mean("eta")[j]
        both = m.outer("s", "s")[0, 0] * m.outer("eta", "eta").diagonal()[j]
        return (
            normal(m.square(0.0, mu=1.0), sd=2.0)
            + normal(m.square(-1.0, s=1.0), sd=0.25)
            + normal(m.square(0.0, eta=1.0), sd=1.0)
            + normal(alone - 2 * cross + both, sd=0.5)
        )

    init = {"s": torch.tensor(1.0), "eta": torch.zeros(5, 1)}
    blocks = [gaussian(mu=(), s=()), gaussian(eta=(5,))]
    return Example(model, blocks, expected, init=init)


EXAMPLES |= {"matrix factorisation": lambda: ratings()}


@example
def values_missing_from_a_normal_with_unknown_noise():
    """obs_mask on y: the missing values share the block of the mean, and inform the precision."""
    y = numbers(7, seed=19)
    known = torch.tensor([True, False, True, True, True, False, True])
    free = (~known).nonzero()[:, 0]

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("data", 7):
            pyro.sample("y", dist.Normal(mu, tau.rsqrt()), obs=y, obs_mask=known)

    def expected(m):
        t, log_t = m.mean("tau"), m.log("tau")
        return (
            gamma(log_t, t, 2.0, 1.0)
            + normal(m.square(0.0, mu=1.0), sd=2.0)
            + normal(m.square(y[known], mu=-torch.ones(5, 1)), t, log_t)
            + normal(m.square(0.0, mu=-torch.ones(2, 1), y_unobserved=1.0), t, log_t)
        )

    blocks = [gammas("tau"), gaussian({"y_unobserved": free}, mu=(), y_unobserved=(2,))]
    return Example(model, blocks, expected)
