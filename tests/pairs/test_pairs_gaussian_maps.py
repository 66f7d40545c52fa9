"""Gaussian sites through affine maps: one step is the dense joint posterior, by linear algebra."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pair_cases import LOG_2PI, MVN, close, fitted, hows
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.nn import functional as F

GROUP = torch.tensor([0, 2, 1, 1, 2, 0])
N = len(GROUP)


class Constants:
    """Covariates that float32 holds exactly, in the dtype of the test."""

    def __init__(self, dtype):
        g = torch.Generator().manual_seed(7)
        self.dtype = dtype
        self.x = self._make(g, N)
        self.X = self._make(g, N, 3)
        self.M = self._make(g, 2, 3)
        self.y = 2 * self._make(g, N)
        self.Y = 2 * self._make(g, N, 2)

    def _make(self, generator, *shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float32)
        return (x * 64).round().to(self.dtype) / 64


@dataclass(frozen=True)
class Vector:
    """A site of independent Normals: in a plate (event_dim 0) or as an event."""

    shape: tuple[int, ...] = ()
    event_dim: int = 0
    loc: float = 0.5
    scale: float = 1.5

    def sample(self, name, dtype):
        fn = dist.Normal(torch.full(self.shape, self.loc, dtype=dtype), self.scale)
        if self.event_dim:
            return pyro.sample(name, fn.to_event(self.event_dim))
        with pyro.plate_stack(f"{name}_plates", self.shape):
            return pyro.sample(name, dist.Normal(torch.tensor(self.loc, dtype=dtype), self.scale))

    def prior(self):
        n = math.prod(self.shape)
        return torch.full((n,), self.loc).double(), self.scale**2 * torch.eye(n).double()


COV = torch.tensor([[2.0, 0.5, -0.25], [0.5, 1.0, 0.25], [-0.25, 0.25, 1.5]])


@dataclass(frozen=True)
class Correlated:
    """A MultivariateNormal site of three."""

    shape: tuple[int, ...] = (3,)

    def sample(self, name, dtype):
        loc = torch.tensor([0.5, -1.0, 0.25], dtype=dtype)
        return pyro.sample(name, dist.MultivariateNormal(loc, COV.to(dtype)))

    def prior(self):
        return torch.tensor([0.5, -1.0, 0.25]).double(), COV.double()


S, V3, E3, P3 = Vector(), Vector((3,)), Vector((3,), 1), Correlated()
Map = tuple[dict[str, Vector | Correlated], Callable[..., Tensor]]


def stacked_columns(c, a, b):
    return torch.stack([a.expand(N), b.expand(N)], -1) @ torch.tensor([1.0, 2.0]).to(c.x)


def linear_layer(c, w, b):
    return F.linear(c.X, w, b)[:, 0] - F.linear(c.X, w, b)[:, 1]


def running_mean(c, w):
    total = w.new_zeros(())
    for i in range(3):
        total = total + w[i] * c.X[:, i]
    return total / 3


# Each gives N predictors; the sites come by name.
MAPS: dict[str, Map] = {
    "a + b * x": ({"a": S, "b": S}, lambda c, a, b: a + b * c.x),
    "a - b": ({"a": S, "b": S}, lambda c, a, b: (a - b) * c.x - (2 * b - 1)),
    "-a / 2 + 3": ({"a": S}, lambda c, a: (-a / 2 + 3).expand(N)),
    "torch.add alpha": ({"a": S, "b": S}, lambda c, a, b: torch.add(a * c.x, b, alpha=-2.0)),
    "X @ w": ({"w": E3}, lambda c, w: c.X @ w),
    "X @ w + b": ({"w": E3, "b": S}, lambda c, w, b: c.X @ w + b),
    "X @ w of a plate": ({"w": V3, "b": S}, lambda c, w, b: c.X @ w + b),
    "w @ X.T": ({"w": E3}, lambda c, w: w @ c.X.T),
    "torch.matmul": ({"w": E3}, lambda c, w: torch.matmul(c.X, w)),
    "torch.mv": ({"w": E3}, lambda c, w: torch.mv(c.X, w)),
    "mm unsqueeze": ({"w": E3}, lambda c, w: torch.mm(c.X, w.unsqueeze(-1)).squeeze(-1)),
    "(X * w).sum(-1)": ({"w": E3}, lambda c, w: (c.X * w).sum(-1)),
    "(X * w).mean(-1)": ({"w": E3}, lambda c, w: (c.X * w).mean(-1)),
    "einsum nk,k": ({"w": E3}, lambda c, w: torch.einsum("nk,k->n", c.X, w)),
    "einsum quadratic in constants": (
        {"W": Vector((2, 3), 2)},
        lambda c, W: torch.einsum("nk,jk,j->n", c.X, W, torch.tensor([1.0, -0.5]).to(c.x)),
    ),
    "F.linear": ({"W": Vector((2, 3), 2), "b": Vector((2,), 1)},
                 lambda c, W, b: linear_layer(c, W, b)),
    "u[group]": ({"u": V3}, lambda c, u: u[GROUP]),
    "u[group] of an event": ({"u": E3}, lambda c, u: u[GROUP]),
    "u[group] of an MVN": ({"u": P3}, lambda c, u: u[GROUP]),
    "a + u[group]": ({"a": S, "u": V3}, lambda c, a, u: a + u[GROUP]),
    "a + u[group] + s[group] x": (
        {"a": S, "u": V3, "s": V3},
        lambda c, a, u, s: a + u[GROUP] + s[GROUP] * c.x,
    ),
    "crossed a[i] + b[j]": (
        {"a": V3, "b": Vector((2,))},
        lambda c, a, b: a[GROUP] + b[torch.arange(N) % 2],
    ),
    "u[:, group]": ({"u": Vector((2, 3))}, lambda c, u: u[:, GROUP].sum(0) * c.x),
    "u[rows, group]": ({"u": Vector((2, 3))}, lambda c, u: u[torch.arange(N) % 2, GROUP]),
    "Vindex(u)[rows, group]": (
        {"u": Vector((2, 3))},
        lambda c, u: Vindex(u)[torch.arange(N) % 2, GROUP],
    ),
    "index_select": ({"u": V3}, lambda c, u: torch.index_select(u, 0, GROUP)),
    "gather": ({"u": V3}, lambda c, u: torch.gather(u, 0, GROUP)),
    "boolean mask": ({"u": E3}, lambda c, u: u[torch.tensor([True, False, True])].sum() + c.x * u[1]),
    "slices": ({"u": E3}, lambda c, u: c.X[:, 1:] @ u[1:] + u[0]),
    "u[..., None]": ({"u": V3}, lambda c, u: (u[..., None] * c.M.T).reshape(N)),
    "cat": ({"a": S, "u": E3}, lambda c, a, u: torch.cat([a.reshape(1), u, -u[:2]])),
    "cat of sites in X @": (
        {"a": S, "u": Vector((2,), 1)},
        lambda c, a, u: c.X @ torch.cat([a.unsqueeze(0), u]),
    ),
    "stack": ({"a": S, "b": S, "d": S}, lambda c, a, b, d: c.X @ torch.stack([a, b, d])),
    "stack on the last dim": ({"a": S, "b": S}, stacked_columns),
    "column_stack": ({"a": S, "b": S}, lambda c, a, b: torch.stack([a * c.x, b + 0 * c.x], 1).sum(1)),
    "loop over elements": ({"w": E3}, running_mean),
    "python sum": ({"w": E3}, lambda c, w: sum(w[i] * c.X[:, i] for i in range(3))),
    "unbind": ({"w": E3}, lambda c, w: c.x * w.unbind(0)[0] + w.unbind(0)[2]),
    "unpacking": ({"w": E3}, lambda c, w: (lambda a, b, d: a + b * c.x + d * c.x**2)(*w)),
    "cumsum": ({"w": Vector((N,), 1)}, lambda c, w: w.cumsum(0)),
    "cumsum of a plate": ({"w": Vector((N,))}, lambda c, w: w.cumsum(-1)),
    "flip and roll": ({"w": Vector((N,), 1)}, lambda c, w: w.flip(0) + w.roll(1)),
    "diff": ({"w": Vector((N + 1,), 1)}, lambda c, w: w[1:] - w[:-1]),
    "torch.diff": ({"w": Vector((N + 1,), 1)}, lambda c, w: torch.diff(w)),
    "reshape and transpose": (
        {"W": Vector((2, 3), 2)},
        lambda c, W: W.T.reshape(N) + W.reshape(-1).flip(0),
    ),
    "permute and flatten": ({"W": Vector((2, 3), 2)}, lambda c, W: W.permute(1, 0).flatten()),
    "matrix times matrix": ({"W": Vector((3, 2), 2)}, lambda c, W: (c.X @ W).sum(-1)),
    "bmm": (
        {"W": Vector((3, 2), 2)},
        lambda c, W: torch.bmm(c.X.unsqueeze(0), W.unsqueeze(0))[0] @ torch.tensor([1.0, 2.0]).to(c.x),
    ),
    "tensordot": ({"w": E3}, lambda c, w: torch.tensordot(c.X, w, dims=1)),
    "outer": ({"w": Vector((2,), 1)}, lambda c, w: torch.outer(c.x[:3], w).reshape(N)),
    "broadcast outer": ({"a": V3, "b": Vector((2,), 1)},
                        lambda c, a, b: (a[:, None] + b).reshape(N)),
    "expand and repeat": ({"w": Vector((2,), 1)}, lambda c, w: w.repeat(3) + w.repeat_interleave(3)),
    "where of a condition": ({"a": S, "b": S}, lambda c, a, b: torch.where(c.x > 0, a, b)),
    "masked sum": ({"w": E3}, lambda c, w: (w * (c.X > 0)).sum(-1)),
    "lerp": ({"a": S, "b": S}, lambda c, a, b: torch.lerp(a.expand(N), b.expand(N), c.x)),
    "addmm": ({"W": Vector((3, 2), 2), "b": Vector((2,), 1)},
              lambda c, W, b: torch.addmm(b, c.X, W).sum(-1)),
    "two regressions": (
        {"a": E3, "b": P3},
        lambda c, a, b: c.X @ a - (c.X**2) @ b,
    ),
    "a site twice": ({"a": S, "w": E3}, lambda c, a, w: a + c.X @ (w + a)),
    "a site that cancels in part": ({"w": E3}, lambda c, w: c.X @ w - w[0] * c.X[:, 0]),
    "MVN in X @": ({"w": P3}, lambda c, w: c.X @ w),
    "MVN in F.linear": ({"w": P3}, lambda c, w: F.linear(c.X, w.unsqueeze(0)).squeeze(-1)),
    "linalg.vecdot": ({"w": E3}, lambda c, w: torch.linalg.vecdot(c.X, w)),
    "linalg.solve": (
        {"w": E3},
        lambda c, w: c.X @ torch.linalg.solve(COV.to(c.x), w),
    ),
    "solve_triangular": (
        {"w": E3},
        lambda c, w: c.X @ torch.linalg.solve_triangular(
            COV.tril().to(c.x), w.unsqueeze(-1), upper=False
        ).squeeze(-1),
    ),
    "pad": ({"w": E3}, lambda c, w: F.pad(w, (1, 2))),
    "split and chunk": (
        {"w": Vector((4,), 1)},
        lambda c, w: w.split(2)[0].sum() * c.x + w.chunk(2)[1].sum(),
    ),
    "take_along_dim": ({"u": V3}, lambda c, u: torch.take_along_dim(u, GROUP)),
    "trace of a product": ({"W": Vector((3, 3), 2)}, lambda c, W: (c.X @ W).diagonal().sum() + c.x),
    "embedding": ({"W": Vector((3, 2), 2)}, lambda c, W: F.embedding(GROUP, W).sum(-1)),
    "conv1d": (
        {"w": E3},
        lambda c, w: F.conv1d(c.x[None, None], w[None, None], padding=1)[0, 0],
    ),
    "kron": ({"w": Vector((2,), 1)}, lambda c, w: torch.kron(w, c.x[:3])),
    "tril": ({"W": Vector((2, 3), 2)}, lambda c, W: W.tril().reshape(N)),
    "clone and contiguous": ({"w": Vector((N,), 1)}, lambda c, w: w.clone().contiguous()),
}  # fmt: skip
NOT_EXACT = (
    "linalg.solve",
    "solve_triangular",
    "pad",
    "conv1d",
    "kron",
)


class Linear:
    """y = A z + c + noise for the flattened sites z, with A and c read off the map itself."""

    def __init__(self, name, dtype):
        self.sites, self.function = MAPS[name]
        self.constants = Constants(dtype)
        double = Constants(torch.float64)
        zero = {n: torch.zeros(s.shape, dtype=torch.float64) for n, s in self.sites.items()}
        self.c = self.function(double, **zero).expand(N)
        columns = []
        for n in self.sites:
            for i in range(zero[n].numel()):
                unit = zero[n].clone()
                unit.reshape(-1)[i] = 1.0
                columns.append(self.function(double, **{**zero, n: unit}).expand(N) - self.c)
        self.a = torch.stack(columns, -1)
        priors = [s.prior() for s in self.sites.values()]
        self.loc = torch.cat([m for m, _ in priors])
        self.cov = torch.block_diag(*[v for _, v in priors])

    def predictor(self, dtype):
        values = {n: s.sample(n, dtype) for n, s in self.sites.items()}
        return self.function(self.constants, **values)

    def posterior(self, y, weight, sd=0.5):
        """Natural parameters, mean, covariance and bound, with row i counted weight_i times."""
        precision = torch.linalg.inv(self.cov)
        p = weight / sd**2
        natural = (
            precision @ self.loc + self.a.T @ (p * (y - self.c)),
            -0.5 * (precision + self.a.T @ (p.unsqueeze(-1) * self.a)),
        )
        prior = (precision @ self.loc, -0.5 * precision)
        constant = -0.5 * p * (y - self.c) ** 2 - 0.5 * weight * (LOG_2PI + 2 * math.log(sd))
        bound = MVN.log_partition(*natural) - MVN.log_partition(*prior) + constant.sum()
        cov = torch.linalg.inv(-2 * natural[1])
        return cov @ natural[0], cov, bound


def check_joint(guide, cvi, sites, mean, cov, dtype):
    """Every site's marginal, and the joint of the sites of each block."""
    place, start = {}, 0
    for n, s in sites.items():
        size = math.prod(s.shape)
        place[n] = slice(start, start + size)
        start += size
    for n, s in sites.items():
        q = guide.posterior(n)
        close(q.mean, mean[place[n]].reshape(s.shape), dtype, f"mean of '{n}'")
        close(q.variance, cov.diagonal()[place[n]].reshape(s.shape), dtype, f"variance of '{n}'")
    index = torch.arange(start)
    for block in cvi.explain().blocks:
        at = torch.cat([index[place[n]] for n in block.sites])
        joint = guide.joint(block.sites)
        close(joint.mean, mean[at], dtype, f"joint mean of {block.sites}")
        close(joint.covariance_matrix, cov[at][:, at], dtype, f"covariance of {block.sites}")
        rest = torch.ones(start, dtype=torch.bool)
        rest[at] = False
        assert float(cov[at][:, rest].abs().sum()) < 1e-12, "sites of two blocks are correlated"


def mark(name):
    """An operation without a rule is sampled, though it is affine."""
    reason = f"torch's {name} has no rule: its messages are sampled"
    return pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=reason))


SOME = ("a + b * x", "X @ w + b", "X @ w of a plate", "u[group]", "a + u[group] + s[group] x",
        "crossed a[i] + b[j]", "cat of sites in X @", "stack", "MVN in X @", "cumsum")  # fmt: skip


@pytest.mark.parametrize("name", [mark(n) if n in NOT_EXACT else n for n in MAPS])
def test_an_affine_map_gives_the_dense_joint(name, dtype):
    """Mean, covariance and evidence, after one step; every edge is exact."""
    check_map(name, dtype, log=False)


@pytest.mark.parametrize("name", SOME)
def test_an_affine_map_of_log_normal_data(name, dtype):
    """As for Normal data, which their logarithms are."""
    check_map(name, dtype, log=True)


def check_map(name, dtype, log):
    case = Linear(name, dtype)
    y = case.constants.y

    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N):
            if log:
                pyro.sample("y", dist.LogNormal(mean, 0.5), obs=y.exp())
            else:
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    log_y = y.exp().double().log()
    mean, cov, bound = case.posterior(log_y, torch.ones(N).double())
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    check_joint(guide, cvi, case.sites, mean, cov, dtype)
    close(-losses[0], bound - (log_y.sum() if log else 0.0), dtype, "the bound")


# --- structures ------------------------------------------------------------------------------------

KEEP = torch.tensor([True, False, True, True, False, True])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0, 1.5])


def masked(case, y, dtype):
    y = torch.where(KEEP, y, torch.full_like(y, float("nan")))

    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N), poutine.mask(mask=KEEP):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model, KEEP.double()


def partly_observed(case, y, dtype):
    y = torch.where(KEEP, y, torch.full_like(y, float("nan")))

    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y, obs_mask=KEEP)

    return model, KEEP.double()


def scaled(case, y, dtype):
    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N), poutine.scale(scale=2.5):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model, torch.full((N,), 2.5).double()


def scaled_by_a_tensor(case, y, dtype):
    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N), poutine.scale(scale=WEIGHT.to(dtype)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model, WEIGHT.double()


def to_event(case, y, dtype):
    def model():
        pyro.sample("y", dist.Normal(case.predictor(dtype), 0.5).to_event(1), obs=y)

    return model, torch.ones(N).double()


def looped(case, y, dtype):
    def model():
        mean = case.predictor(dtype)
        for n in range(N):
            pyro.sample(f"obs_{n}", dist.Normal(mean[n], 0.5), obs=y[n])

    return model, torch.ones(N).double()


def in_two_parts(case, y, dtype):
    def model():
        mean = case.predictor(dtype)
        with pyro.plate("first", 2):
            pyro.sample("y_first", dist.Normal(mean[:2], 0.5), obs=y[:2])
        with pyro.plate("rest", N - 2):
            pyro.sample("y_rest", dist.Normal(mean[2:], 0.5), obs=y[2:])

    return model, torch.ones(N).double()


def in_two_plates(case, y, dtype):
    def model():
        mean = case.predictor(dtype).reshape(2, 3)
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y.reshape(2, 3))

    return model, torch.ones(N).double()


def empty(case, y, dtype):
    def model():
        pyro.sample("y", dist.Normal(case.predictor(dtype)[:0], 0.5).to_event(1), obs=y[:0])

    return model, torch.zeros(N).double()


STRUCTURES = [masked, partly_observed, scaled, scaled_by_a_tensor, to_event, looped, in_two_parts,
              in_two_plates, empty]  # fmt: skip


SHAPED = [(n, torch.float64) for n in SOME] + [(n, torch.float32) for n in SOME[1:6:2]]


@pytest.mark.parametrize(("name", "dtype"), SHAPED, indirect=["dtype"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.__name__)
def test_an_affine_map_in_every_structure(name, structure, dtype):
    """Rows that are masked, missing, scaled or named one by one."""
    case = Linear(name, dtype)
    y = case.constants.y
    model, weight = structure(case, y, dtype)
    mean, cov, bound = case.posterior(y.double(), weight)
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    if structure is partly_observed:  # the missing cells are sites of the block: marginals only
        start = 0
        for n, s in case.sites.items():
            at = slice(start, start + math.prod(s.shape))
            start = at.stop
            q = guide.posterior(n)
            close(q.mean.reshape(-1), mean[at], dtype, f"mean of '{n}'")
            close(q.variance.reshape(-1), cov.diagonal()[at], dtype, f"variance of '{n}'")
    else:
        check_joint(guide, cvi, case.sites, mean, cov, dtype)
    close(-losses[0], bound, dtype, "the bound")


NOISE = COV + 0.25 * torch.eye(3)


@pytest.mark.parametrize("name", ["X @ w + b", "a + u[group] + s[group] x", "MVN in X @", "stack"])
@pytest.mark.parametrize("spelling", ["covariance_matrix", "scale_tril", "precision_matrix"])
def test_an_affine_map_under_correlated_noise(name, spelling, dtype):
    """Rows of three as one MultivariateNormal, in a plate of two."""
    case = Linear(name, dtype)
    y = case.constants.y.reshape(2, 3)
    noise = {"covariance_matrix": NOISE.double(), "scale_tril": torch.linalg.cholesky(NOISE.double()),
             "precision_matrix": torch.linalg.inv(NOISE.double())}[spelling].to(dtype)  # fmt: skip

    def model():
        mean = case.predictor(dtype).reshape(2, 3)
        with pyro.plate("rows", 2):
            pyro.sample("y", dist.MultivariateNormal(mean, **{spelling: noise}), obs=y)

    full = torch.block_diag(NOISE.double(), NOISE.double())
    residual = y.double().reshape(-1) - case.c
    precision = torch.linalg.inv(case.cov) + case.a.T @ torch.linalg.solve(full, case.a)
    cov = torch.linalg.inv(precision)
    shift = torch.linalg.solve(case.cov, case.loc) + case.a.T @ torch.linalg.solve(full, residual)
    marginal = dist.MultivariateNormal(case.a @ case.loc, case.a @ case.cov @ case.a.T + full)
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    check_joint(guide, cvi, case.sites, cov @ shift, cov, dtype)
    close(-losses[0], marginal.log_prob(residual), dtype, "log evidence")


@pytest.mark.parametrize("spelling", ["matmul", "einsum", "sum", "event"])
def test_independent_regressions_side_by_side(spelling, dtype):
    """A batch of weight vectors: each has the posterior of its own regression."""
    c = Constants(dtype)

    def mean(w):
        if spelling == "matmul":
            return c.X @ w.mT
        if spelling == "einsum":
            return torch.einsum("nk,dk->nd", c.X, w)
        return (c.X.unsqueeze(1) * w).sum(-1)

    def model():
        with pyro.plate("d", 2, dim=-1):
            w = pyro.sample("w", dist.MultivariateNormal(torch.ones(3), COV.to(dtype)))
        if spelling == "event":
            with pyro.plate("data", N):
                pyro.sample("y", dist.Normal(mean(w), 0.5).to_event(1), obs=c.Y)
        else:
            with pyro.plate("data", N, dim=-2), pyro.plate("columns", 2, dim=-1):
                pyro.sample("y", dist.Normal(mean(w), 0.5), obs=c.Y)

    x, y = c.X.double(), c.Y.double()
    cov = torch.linalg.inv(torch.linalg.inv(COV.double()) + 4 * x.T @ x)
    shift = torch.linalg.solve(COV.double(), torch.ones(3).double()).unsqueeze(-1) + 4 * x.T @ y
    marginal = dist.MultivariateNormal(
        x.sum(-1), x @ COV.double() @ x.T + 0.25 * torch.eye(N).double()
    )
    guide, cvi, losses = fitted(model)
    assert hows(cvi) == {"exact"}, cvi.explain()
    close(guide.posterior("w").mean, (cov @ shift).T, dtype, "mean")
    whole = torch.block_diag(cov, cov)
    close(guide.joint(["w"]).covariance_matrix, whole, dtype, "covariance")
    close(-losses[0], marginal.log_prob(y.T).sum(), dtype, "log evidence")


def test_the_prior_is_tempered_with_the_data(dtype):
    """poutine.scale around the whole model: prior and data count three times, the guide once."""
    case = Linear("X @ w + b", dtype)
    y = case.constants.y

    def model():
        mean = case.predictor(dtype)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    _, cov, _ = case.posterior(y.double(), torch.ones(N).double())
    mean, _, _ = case.posterior(y.double(), torch.ones(N).double())
    guide, cvi, losses = fitted(poutine.scale(model, scale=3.0))
    check_joint(guide, cvi, case.sites, mean, cov / 3, dtype)
    precision = torch.linalg.inv(case.cov)
    prior = (precision @ case.loc, -0.5 * precision)
    posterior = (3 * torch.linalg.solve(cov, mean), -1.5 * torch.linalg.inv(cov))
    constant = (-2 * (y.double() - case.c) ** 2 - 0.5 * LOG_2PI + math.log(2)).sum()
    bound = MVN.log_partition(*posterior) - 3 * MVN.log_partition(*prior) + 3 * constant
    close(-losses[0], bound, dtype, "the bound")
