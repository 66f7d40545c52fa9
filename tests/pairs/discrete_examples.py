"""Mixtures and other models with discrete parents, each with its expected log joint."""

import pyro
import pyro.distributions as dist
import torch
from cavi_cases import (
    EXAMPLES,
    Block,
    Example,
    beta,
    dirichlet,
    discrete,
    example,
    gamma,
    gammas,
    gaussian,
    inverse_gamma,
    normal,
    numbers,
    one_hot,
)
from pair_cases import (
    BETA,
    CANONICAL,
    DIRICHLET,
    GAMMA,
    INVERSE_GAMMA,
    MVN,
    NORMAL,
    PAIRS,
    natural_of,
)
from pyro import poutine
from pyro.ops.indexing import Vindex

# --- discrete parents ------------------------------------------------------------------------------

MEANS = (-4.0, 0.0, 4.0)


def clusters(n=12, seed=12):
    """Labels of three clusters, and values around their means."""
    z = torch.arange(n) % 3
    return z, torch.tensor(MEANS)[z] + 0.5 * numbers(n, seed=seed)


def weights_of(m, probs):
    """E log p(z) under a Dirichlet, and its prior, with concentrations (1, 2, 3/2)."""
    return (probs * m.log("pi")).sum() + dirichlet(m.log("pi"), [1.0, 2.0, 1.5])


def sample_weights():
    return pyro.sample("pi", dist.Dirichlet(torch.tensor([1.0, 2.0, 1.5])))


PI = Block(DIRICHLET, {"pi": (3,)})


def mixture(noise, look):
    """y_n ~ Normal(mu[z_n], noise) with Dirichlet weights."""
    z0, y = clusters()

    def pick(table, z):
        if look == "Vindex":
            return Vindex(table)[..., z]
        if look == "gather":
            return table.gather(-1, z.reshape(-1)).reshape(z.shape)
        if look == "one hot":
            return (torch.nn.functional.one_hot(z, 3).to(table) * table).sum(-1)
        return table[z]

    def model():
        pi = sample_weights()
        if noise == "shared":
            tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            if noise == "each":
                tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
            elif noise == "inverse gamma":
                tau = pyro.sample("tau", dist.InverseGamma(3.0, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(pi))
            if noise == "known":
                sd = 1.0
            elif noise == "shared":
                sd = tau.rsqrt()
            elif noise == "each":
                sd = pick(tau, z).rsqrt()
            else:
                sd = pick(tau, z).sqrt()
            pyro.sample("y", dist.Normal(pick(mu, z), sd), obs=y)

    def expected(m):
        r = m.probs("z")
        square = m.square(
            y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(len(y), 1)
        ).reshape(-1, 3)
        total = weights_of(m, r) + normal(m.square(0.0, mu=1.0), sd=5.0)
        if noise == "known":
            return total + normal(square, sd=1.0, weight=r)
        if noise == "inverse gamma":
            t, log_t = m.reciprocal("tau"), m.log("tau")
            total = total + normal(square, t, -log_t, weight=r)
            return total + inverse_gamma(log_t, t, 3.0, 2.0)
        t, log_t = m.mean("tau"), m.log("tau")
        return total + normal(square, t, log_t, weight=r) + gamma(log_t, t, 2.0, 1.0)

    blocks = [PI, gaussian(mu=(3,))]
    if noise != "known":
        family = INVERSE_GAMMA if noise == "inverse gamma" else GAMMA
        blocks.append(Block(family, {"tau": () if noise == "shared" else (3,)}))
    blocks.append(discrete("z", (len(y),), 3))
    return Example(model, blocks, expected, init={"z": z0})


EXAMPLES |= {
    "mixture, mu[z]": lambda: mixture("known", "index"),
    "mixture, mu[z], tau": lambda: mixture("shared", "index"),
    "mixture, mu[z], tau[z]": lambda: mixture("each", "index"),
    "mixture, mu[z], v[z]": lambda: mixture("inverse gamma", "index"),
    "mixture, Vindex(mu)[..., z]": lambda: mixture("each", "Vindex"),
    "mixture, gather": lambda: mixture("each", "gather"),
    "mixture, one hot": lambda: mixture("known", "one hot"),
}


def emissions(kind, look="index"):
    """x_n from a distribution whose parameter is a table at z_n, with Dirichlet weights."""
    n = 12
    z0 = torch.arange(n) % 3
    tables = {
        "poisson": torch.tensor([1.0, 8.0, 30.0]),
        "exponential": torch.tensor([0.25, 32.0, 4096.0]),
    }
    g = torch.Generator().manual_seed(13)
    if kind == "poisson":
        x = torch.poisson(tables[kind][z0].float(), generator=g).to(torch.get_default_dtype())
    elif kind == "exponential":
        x = (torch.rand(n, generator=g, dtype=torch.float32) * 64).ceil() / 64
        x = x.to(torch.get_default_dtype()) / tables[kind][z0]
    elif kind == "categorical":  # five words, in sentences of six
        words = torch.tensor([[0, 0, 1], [2, 2, 3], [4, 4, 0]])
        x = words[z0][:, torch.randint(3, (6,), generator=g)]
    else:  # five bits
        centre = torch.tensor([[1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0]])
        flip = torch.rand((n, 6), generator=g, dtype=torch.float32) < 0.03
        x = (centre[z0] ^ flip.long()).to(torch.get_default_dtype())

    def pick(table, z):
        return Vindex(table)[z] if look == "Vindex" else table[z]

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            if kind == "poisson":
                theta = pyro.sample("theta", dist.Gamma(2.0, 0.25))
            elif kind == "exponential":
                theta = pyro.sample("theta", dist.Gamma(2.0, 2.0))
            elif kind == "categorical":
                theta = pyro.sample("theta", dist.Dirichlet(torch.ones(5) * 0.75))
            else:
                theta = pyro.sample("theta", dist.Beta(1.5, 2.0).expand([6]).to_event(1))
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Categorical(pi))
            if kind == "poisson":
                pyro.sample("x", dist.Poisson(pick(theta, z)), obs=x)
            elif kind == "exponential":
                pyro.sample("x", dist.Exponential(pick(theta, z)), obs=x)
            elif kind == "categorical":
                row = pick(theta, z).unsqueeze(-2)
                pyro.sample("x", dist.Categorical(row).expand_by([]).to_event(1), obs=x)
            elif kind == "bernoulli":
                pyro.sample("x", dist.Bernoulli(pick(theta, z)).to_event(1), obs=x)

    def expected(m):
        r, d = m.probs("z"), x.double() if kind != "categorical" else x
        total = weights_of(m, r)
        if kind == "poisson":
            total = total + gamma(m.log("theta"), m.mean("theta"), 2.0, 0.25)
            log_p = d[:, None] * m.log("theta") - m.mean("theta") - torch.lgamma(d + 1)[:, None]
        elif kind == "exponential":
            total = total + gamma(m.log("theta"), m.mean("theta"), 2.0, 2.0)
            log_p = m.log("theta") - d[:, None] * m.mean("theta")
        elif kind == "categorical":
            total = total + dirichlet(m.log("theta"), 0.75)
            log_p = one_hot(d, 5).sum(1) @ m.log("theta").T
        else:
            up, down = m.log("theta"), m.log_complement("theta")
            total = total + beta(up, down, 1.5, 2.0)
            log_p = d @ up.T + (1 - d) @ down.T
        return total + (r * log_p).sum()

    families = {"categorical": (DIRICHLET, (3, 5)), "bernoulli": (BETA, (3, 6))}
    family, shape = families.get(kind, (GAMMA, (3,)))
    blocks = [PI, Block(family, {"theta": shape}), discrete("z", (n,), 3)]
    return Example(model, blocks, expected, init={"z": z0})


EXAMPLES |= {
    "mixture, Poisson(rate[z])": lambda: emissions("poisson"),
    "mixture, Poisson(Vindex(rate)[z])": lambda: emissions("poisson", "Vindex"),
    "mixture, Exponential(rate[z])": lambda: emissions("exponential"),
    "mixture, Categorical(theta[z])": lambda: emissions("categorical"),
    "mixture, Bernoulli(theta[z])": lambda: emissions("bernoulli"),
    "mixture, Bernoulli(Vindex(theta)[z])": lambda: emissions("bernoulli", "Vindex"),
}


def planar_mixture(spelling):
    """Vectors y_n ~ Normal(mu[z_n], 1) in two dimensions."""
    z0 = torch.arange(9) % 3
    centre = torch.tensor([[-4.0, 0.0], [4.0, 1.0], [0.0, 5.0]])
    y = centre[z0] + 0.5 * numbers(9, 2, seed=14)
    cov = torch.tensor([[1.0, 0.5], [0.5, 2.0]])

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        with pyro.plate("data", 9):
            z = pyro.sample("z", dist.Categorical(pi))
            if spelling == "MultivariateNormal":
                pyro.sample("y", dist.MultivariateNormal(mu[z], cov.to(mu.dtype)), obs=y)
            elif spelling == "Vindex":
                pyro.sample("y", dist.Normal(Vindex(mu)[z], 1.0).to_event(1), obs=y)
            else:
                pyro.sample("y", dist.Normal(mu[z], 1.0).to_event(1), obs=y)

    def expected(m):
        r = m.probs("z")
        white, log_det = torch.eye(2).double(), 0.0
        if spelling == "MultivariateNormal":
            white = torch.linalg.inv(torch.linalg.cholesky(cov.double()))
            log_det = float(torch.logdet(white))
        # whitened residuals of every row n, cluster k and coordinate
        residual = (y.double() @ white.T)[:, None].expand(9, 3, 2).reshape(-1)
        design = torch.einsum("kl,ij->kilj", torch.eye(3).double(), white).reshape(6, 6)
        square = m.square(residual, mu=-design.repeat(9, 1)).reshape(9, 3, 2)
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square, sd=1.0, weight=r.unsqueeze(-1))
            + log_det * r.sum()
        )

    blocks = [PI, gaussian(mu=(3, 2)), discrete("z", (9,), 3)]
    return Example(model, blocks, expected, init={"z": z0})


EXAMPLES |= {
    "planar mixture": lambda: planar_mixture("Normal"),
    "planar mixture, Vindex": lambda: planar_mixture("Vindex"),
    "planar mixture, MultivariateNormal": lambda: planar_mixture("MultivariateNormal"),
}


@example
def mixture_of_regressions():
    """y ~ Normal(x . w[z], tau[z]): a line for each class."""
    n = 12
    x = torch.stack([torch.ones(n), numbers(n, seed=15)], -1)
    z0 = torch.arange(n) % 2
    y = torch.where(z0 == 0, 4 + x[:, 1], -4 - x[:, 1]) + 0.25 * numbers(n, seed=16)

    def model():
        with pyro.plate("k", 2):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 4.0).to_event(1))
            tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.25, 0.75])))
            pyro.sample("y", dist.Normal((x * w[z]).sum(-1), tau[z].rsqrt()), obs=y)

    def expected(m):
        r = m.probs("z")
        design = torch.einsum("nd,kl->nkld", x.double(), torch.eye(2).double()).reshape(2 * n, 4)
        square = m.square(y.double().repeat_interleave(2), w=-design).reshape(n, 2)
        return (
            (r * torch.tensor([0.25, 0.75]).double().log()).sum()
            + normal(m.square(0.0, w=1.0), sd=4.0)
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + normal(square, m.mean("tau"), m.log("tau"), weight=r)
        )

    blocks = [gaussian(w=(2, 2)), gammas("tau", 2), discrete("z", (n,), 2)]
    return Example(model, blocks, expected, init={"z": z0})


@example
def topics():
    """LDA: theta_d ~ Dirichlet, z_dn ~ Categorical(theta_d), words from phi[z]."""
    words = torch.tensor([[0, 0, 1, 1, 0], [2, 3, 2, 3, 3], [0, 1, 2, 3, 1]])
    z0 = (words >= 2).long()

    def model():
        with pyro.plate("topics", 2):
            phi = pyro.sample("phi", dist.Dirichlet(0.5 * torch.ones(4)))
        with pyro.plate("documents", 3, dim=-2):
            theta = pyro.sample("theta", dist.Dirichlet(torch.tensor([1.0, 0.75])))
            with pyro.plate("words", 5, dim=-1):
                z = pyro.sample("z", dist.Categorical(theta))
                pyro.sample("w", dist.Categorical(phi[z]), obs=words)

    def expected(m):
        r = m.probs("z")
        log_p = m.log("phi").T[words] + m.log("theta").unsqueeze(1)
        return (
            dirichlet(m.log("phi"), 0.5)
            + dirichlet(m.log("theta"), [1.0, 0.75])
            + (r * log_p).sum()
        )

    blocks = [
        Block(DIRICHLET, {"phi": (2, 4)}),
        Block(DIRICHLET, {"theta": (3, 2)}),
        discrete("z", (3, 5), 2),
    ]
    return Example(model, blocks, expected, init={"z": z0})


@example
def a_class_for_each_document():
    """z_d in the outer plate governs all words of the inner one; ragged rows under a mask."""
    words = torch.tensor([[0, 0, 1, 1, 0], [2, 3, 2, 3, 3], [0, 1, 2, 0, 1], [3, 2, 3, 2, 2]])
    keep = torch.arange(5) < torch.tensor([5, 3, 4, 2]).unsqueeze(-1)
    z0 = torch.tensor([0, 1, 0, 1]).unsqueeze(-1)

    def model():
        pi = pyro.sample("pi", dist.Dirichlet(torch.tensor([1.0, 2.0])))
        with pyro.plate("classes", 2):
            phi = pyro.sample("phi", dist.Dirichlet(0.5 * torch.ones(4)))
        with pyro.plate("documents", 4, dim=-2):
            z = pyro.sample("z", dist.Categorical(pi))
            with pyro.plate("words", 5, dim=-1), poutine.mask(mask=keep):
                pyro.sample("w", dist.Categorical(phi[z]), obs=words)

    def expected(m):
        r = m.probs("z")
        log_p = (m.log("phi").T[words] * keep.double().unsqueeze(-1)).sum(1)
        return (
            dirichlet(m.log("phi"), 0.5)
            + dirichlet(m.log("pi"), [1.0, 2.0])
            + (r * (log_p + m.log("pi"))).sum()
        )

    blocks = [
        Block(DIRICHLET, {"pi": (2,)}),
        Block(DIRICHLET, {"phi": (2, 4)}),
        discrete("z", (4,), 2),
    ]
    return Example(model, blocks, expected, init={"z": z0})


@example
def a_bernoulli_switch():
    """y ~ Normal(z b, 1/2) with z ~ Bernoulli(p), p ~ Beta: a value of 0 or 1 as a factor."""
    on = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0])
    y = 3 * on + 0.5 * numbers(8, seed=17)

    def model():
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Bernoulli(p))
            pyro.sample("y", dist.Normal(z * b, 0.5), obs=y)

    def expected(m):
        r, d = m.probs("z"), y.double()
        return (
            beta(m.log("p"), m.log_complement("p"), 2.0, 3.0)
            + normal(m.square(0.0, b=1.0), sd=3.0)
            + (r[:, 1] * m.log("p") + r[:, 0] * m.log_complement("p")).sum()
            + normal(d**2, sd=0.5, weight=r[:, 0])
            + normal(m.square(d, b=-torch.ones(8, 1)), sd=0.5, weight=r[:, 1])
        )

    blocks = [Block(BETA, {"p": ()}), gaussian(b=()), discrete("z", (8,), 2)]
    return Example(model, blocks, expected, init={"z": on.to(y.dtype)})


@example
def a_global_switch():
    """One discrete site outside of all plates chooses the model of all rows."""
    y = numbers(6, seed=18) + 1

    def model():
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.25, 0.75])))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("k", 2):
            mu = pyro.sample("mu", dist.Normal(torch.tensor([0.0, 1.0]), 1.0))
        with pyro.plate("data", 6):
            pyro.sample("y", dist.Normal(mu[z], tau.rsqrt()), obs=y)

    def expected(m):
        r = m.probs("z")
        square = m.square(y.double().repeat_interleave(2), mu=-torch.eye(2).repeat(6, 1))
        return (
            (r * torch.tensor([0.25, 0.75]).double().log()).sum()
            + gamma(m.log("tau"), m.mean("tau"), 2.0, 1.0)
            + normal(m.square(torch.tensor([0.0, -1.0]), mu=1.0), sd=1.0)
            + normal(square.reshape(6, 2), m.mean("tau"), m.log("tau"), weight=r)
        )

    blocks = [gammas("tau"), gaussian(mu=(2,)), discrete("z", (), 2)]
    return Example(model, blocks, expected, init={"z": torch.tensor(1)})


@example
def a_mixture_under_mask_and_scale():
    """Rows that are masked (with NaN) or count twice, with their discrete parents."""
    z0, y = clusters(9)
    keep = torch.tensor([True] * 7 + [False] * 2)
    y = torch.where(keep, y, torch.full_like(y, float("nan")))

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 9):
            z = pyro.sample("z", dist.Categorical(pi))
            with poutine.mask(mask=keep), poutine.scale(scale=0.5):
                pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    def expected(m):
        r = m.probs("z")
        d = torch.nan_to_num(y.double()).repeat_interleave(3)
        square = m.square(d, mu=-torch.eye(3).repeat(9, 1)).reshape(9, 3)
        w = 0.5 * keep.double().unsqueeze(-1)
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square, sd=1.0, weight=w * r)
        )

    blocks = [PI, gaussian(mu=(3,)), discrete("z", (9,), 3)]
    return Example(model, blocks, expected, init={"z": z0})


@example
def a_mixture_of_which_some_labels_are_known():
    """obs_mask on z: the known labels teach the weights and means, the others are latent."""
    z0, y = clusters(9)
    known = torch.tensor([True, False, False, True, True, False, False, False, True])
    free = (~known).nonzero()[:, 0]

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 9):
            z = pyro.sample("z", dist.Categorical(pi), obs=z0, obs_mask=known)
            pyro.sample("y", dist.Normal(mu[z], tau[z].rsqrt()), obs=y)

    def expected(m):
        r = one_hot(z0, 3).clone()
        r[free] = m.probs("z_unobserved")
        square = m.square(y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(9, 1))
        t, log_t = m.mean("tau"), m.log("tau")
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + gamma(log_t, t, 2.0, 1.0)
            + normal(square.reshape(9, 3), t, log_t, weight=r)
        )

    blocks = [PI, gaussian(mu=(3,)), gammas("tau", 3), discrete("z_unobserved", (5,), 3, free)]
    return Example(model, blocks, expected, init={"z_unobserved": z0})


@example
def a_mixture_in_a_python_loop():
    """Separately named discrete sites z_i and data y_i."""
    z0, y = clusters(6)

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        for i in range(6):
            z = pyro.sample(f"z_{i}", dist.Categorical(pi))
            pyro.sample(f"y_{i}", dist.Normal(mu[z], 1.0), obs=y[i])

    def expected(m):
        r = torch.stack([m.probs(f"z_{i}") for i in range(6)])
        square = m.square(y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(6, 1))
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(6, 3), sd=1.0, weight=r)
        )

    blocks = [PI, gaussian(mu=(3,)), *[discrete(f"z_{i}", (), 3) for i in range(6)]]
    init = {f"z_{i}": z0[i] for i in range(6)}
    return Example(model, blocks, expected, init=init)


@example
def independent_mixtures_side_by_side():
    """Two mixtures as a batch: tables (2, 3), labels (n, 2), looked up with Vindex."""
    z0, y = clusters(9)
    z0 = torch.stack([z0, z0.flip(0)], -1)
    y = torch.tensor(MEANS)[z0] + 0.5 * numbers(9, 2, seed=20)

    def model():
        with pyro.plate("b", 2, dim=-1):
            pi = pyro.sample("pi", dist.Dirichlet(torch.tensor([1.0, 2.0, 1.5])))
            mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 5.0).to_event(1))
            with pyro.plate("data", 9, dim=-2):
                z = pyro.sample("z", dist.Categorical(pi))
                pyro.sample("y", dist.Normal(Vindex(mu)[..., z], 1.0), obs=y)

    def expected(m):
        r = m.probs("z")  # n, b, k
        design = torch.eye(6).reshape(2, 3, 6).expand(9, 2, 3, 6).reshape(54, 6)
        square = m.square(y.double().reshape(-1).repeat_interleave(3), mu=-design)
        return (
            (r * m.log("pi")).sum()
            + dirichlet(m.log("pi"), [1.0, 2.0, 1.5])
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(9, 2, 3), sd=1.0, weight=r)
        )

    blocks = [Block(DIRICHLET, {"pi": (2, 3)}), gaussian(mu=(2, 3)), discrete("z", (9, 2), 3)]
    return Example(model, blocks, expected, init={"z": z0})


# --- every pair under a discrete parent --------------------------------------------------------------


def mixture_of(pair, look):
    """x_n ~ likelihood(theta[z_n]), theta_k with the pair's prior: whatever the pair is."""
    n = 9
    x, z0 = pair.data((n,)), torch.arange(n) % 3
    k = torch.arange(3.0)

    def pick(table, z):
        return Vindex(table)[z] if look == "Vindex" else table[z]

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            theta = pyro.sample("theta", pair.prior(k))
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("x", pair.likelihood(pick(theta, z)), obs=x)

    prior = natural_of(pair.family, pair.prior(k))
    d = x if x.dtype == torch.long else x.double()
    messages, constant = pair.message(d), pair.constant(d)
    gaussian_like = pair.family in (NORMAL, MVN)
    event = (2,) if pair.family is MVN else (3,) if pair.family is DIRICHLET else ()

    def statistics(m):
        if not gaussian_like:
            return m.means["theta"]
        second = m.outer("theta", "theta")
        if pair.family is NORMAL:
            return m.mean("theta"), second.diagonal()
        return m.mean("theta"), torch.stack([second.reshape(3, 2, 3, 2)[i, :, i] for i in range(3)])

    def expected(m):
        r = m.probs("z")
        total = weights_of(m, r) + (r * constant.unsqueeze(-1)).sum()
        total = total - pair.family.log_partition(*prior).sum()
        for a, b, t, e in zip(prior, messages, statistics(m), pair.family.event_dims, strict=True):
            weighted = (r[(..., *([None] * e))] * b.unsqueeze(1)).sum(0)
            total = total + ((a + weighted) * t).sum()
        return total

    block = Block(MVN if gaussian_like else pair.family, {"theta": (3, *event)})
    return Example(model, [PI, block, discrete("z", (n,), 3)], expected, init={"z": z0})


def _register_mixtures():
    for name in (*CANONICAL, "inverse_gamma-poisson", "gamma-normal[1 / tau.sqrt()]"):
        EXAMPLES[f"mixture of {name}"] = lambda p=PAIRS[name]: mixture_of(p, "index")
    for name in ("dirichlet-multinomial", "mvn-normal"):
        EXAMPLES[f"mixture of {name}, Vindex"] = lambda p=PAIRS[name]: mixture_of(p, "Vindex")


_register_mixtures()
MIXTURES_OF_PAIRS = frozenset(n for n in EXAMPLES if n.startswith("mixture of "))


# --- discrete sites under mask and scale --------------------------------------------------------------


@example
def a_mixture_scaled_as_a_whole():
    """poutine.scale around everything: weights, means, labels and data count one and a half times."""
    z0, y = clusters(9)

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 9):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    def expected(m):
        r = m.probs("z")
        square = m.square(y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(9, 1))
        return 1.5 * (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(9, 3), sd=1.0, weight=r)
        )

    blocks = [PI, gaussian(mu=(3,)), discrete("z", (9,), 3)]
    return Example(poutine.scale(model, scale=1.5), blocks, expected, init={"z": z0})


@example
def a_mixture_scaled_by_row():
    """Rows that count as often as a tensor says: labels and data alike."""
    z0, y = clusters(9)
    s = torch.tensor([0.5, 1.0, 2.0] * 3)

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 9), poutine.scale(scale=s):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    def expected(m):
        w, r = s.double().unsqueeze(-1), m.probs("z")
        square = m.square(y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(9, 1))
        return (
            weights_of(m, w * r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(9, 3), sd=1.0, weight=w * r)
        )

    blocks = [PI, gaussian(mu=(3,)), discrete("z", (9,), 3)]
    return Example(model, blocks, expected, init={"z": z0})


@example
def a_mixture_with_padding():
    """Rows whose label and datum are both masked add nothing."""
    z0, y = clusters(9)
    keep = torch.arange(9) < 6
    y = torch.where(keep, y, torch.full_like(y, float("nan")))
    cells = torch.arange(6)

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 9), poutine.mask(mask=keep):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    def expected(m):
        r = m.probs("z")
        square = m.square(y[:6].double().repeat_interleave(3), mu=-torch.eye(3).repeat(6, 1))
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(6, 3), sd=1.0, weight=r)
        )

    blocks = [PI, gaussian(mu=(3,)), discrete("z", (6,), 3, cells)]
    return Example(model, blocks, expected, init={"z": z0})


@example
def labels_without_a_prior():
    """A mask on the labels alone: their prior is flat, and teaches the weights nothing."""
    z0, y = clusters(6)
    keep = torch.tensor([True, True, False, True, False, True])

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 6):
            with poutine.mask(mask=keep):
                z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    def expected(m):
        r = m.probs("z")
        square = m.square(y.double().repeat_interleave(3), mu=-torch.eye(3).repeat(6, 1))
        return (
            weights_of(m, r * keep.double().unsqueeze(-1))
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(square.reshape(6, 3), sd=1.0, weight=r)
        )

    blocks = [PI, gaussian(mu=(3,)), discrete("z", (6,), 3)]
    return Example(model, blocks, expected, init={"z": z0})


@example
def values_missing_from_a_mixture():
    """obs_mask on y under latent labels: missing values are Gaussian given labels and means."""
    z0, y = clusters(6)
    known = torch.tensor([True, True, True, False, True, False])
    free = (~known).nonzero()[:, 0]

    def model():
        pi = sample_weights()
        with pyro.plate("k", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y, obs_mask=known)

    def expected(m):
        r = m.probs("z")
        seen = m.square(y[known].double().repeat_interleave(3), mu=-torch.eye(3).repeat(4, 1))
        missing = m.square(
            0.0,
            mu=-torch.eye(3).repeat(2, 1),
            y_unobserved=torch.eye(2).repeat_interleave(3, 0),
        )
        return (
            weights_of(m, r)
            + normal(m.square(0.0, mu=1.0), sd=5.0)
            + normal(seen.reshape(4, 3), sd=1.0, weight=r[known])
            + normal(missing.reshape(2, 3), sd=1.0, weight=r[free])
        )

    blocks = [
        PI,
        gaussian({"y_unobserved": free}, mu=(3,), y_unobserved=(2,)),
        discrete("z", (6,), 3),
    ]
    return Example(model, blocks, expected, init={"z": z0})


@example
def a_switch_of_which_some_values_are_known():
    """obs_mask on a Bernoulli site."""
    on = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    y = 3 * on + 0.5 * numbers(6, seed=17)
    known = torch.tensor([True, True, False, False, False, True])
    free = (~known).nonzero()[:, 0]

    def model():
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Bernoulli(p), obs=on, obs_mask=known)
            pyro.sample("y", dist.Normal(z * b, 0.5), obs=y)

    def expected(m):
        r, d = one_hot(on.long(), 2).clone(), y.double()
        r[free] = m.probs("z_unobserved")
        return (
            beta(m.log("p"), m.log_complement("p"), 2.0, 3.0)
            + normal(m.square(0.0, b=1.0), sd=3.0)
            + (r[:, 1] * m.log("p") + r[:, 0] * m.log_complement("p")).sum()
            + normal(d**2, sd=0.5, weight=r[:, 0])
            + normal(m.square(d, b=-torch.ones(6, 1)), sd=0.5, weight=r[:, 1])
        )

    blocks = [Block(BETA, {"p": ()}), gaussian(b=()), discrete("z_unobserved", (3,), 2, free)]
    return Example(model, blocks, expected, init={"z_unobserved": on})
