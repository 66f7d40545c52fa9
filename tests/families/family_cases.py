"""One case per family: proper naturals with batch shape (4,), improper ones, and directions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_cvi import families as f
from pyro_cvi.families import AbstractFamily, Natural

BATCH = 4


@dataclass(frozen=True)
class Case:
    family: AbstractFamily
    draw: Callable[[torch.Generator], Natural]  # float64, proper, moderately shaped
    improper: tuple[Natural, ...]  # on the boundary, outside, and not finite
    bounded: bool = True  # whether some direction leaves the domain
    degrees: int = 1  # dimension of the family's minimal coordinates

    def natural(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Natural:
        drawn = self.draw(torch.Generator().manual_seed(seed))
        return tuple(a.to(dtype) for a in drawn)

    def direction(self, dtype: torch.dtype = torch.float64, seed: int = 9) -> Natural:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(a.shape, generator=generator).to(dtype) for a in self.natural()]
        return tuple(
            a + a.mT if n == 2 else a for a, n in zip(drawn, self.family.event_dims, strict=True)
        )


def positive(generator: torch.Generator, *event: int) -> Tensor:
    return torch.randn((BATCH, *event), generator=generator, dtype=torch.float64).exp() + 0.2


def gaussian(generator: torch.Generator, d: int) -> Natural:
    loc = torch.randn((BATCH, d), generator=generator, dtype=torch.float64)
    root = torch.randn((BATCH, d, d), generator=generator, dtype=torch.float64)
    return f.from_loc_precision(loc, root @ root.mT + 0.5 * torch.eye(d, dtype=torch.float64))


def wishart(generator: torch.Generator, d: int) -> Natural:
    _, second = gaussian(generator, d)
    return second, torch.rand(BATCH, generator=generator, dtype=torch.float64) * 2 - 0.4


@torch.distributions.kl.register_kl(torch.distributions.Wishart, torch.distributions.Wishart)
def kl_of_wisharts(p: torch.distributions.Wishart, q: torch.distributions.Wishart) -> Tensor:
    """The textbook's, in nu and V; torch has none."""
    d = p.event_shape[-1]
    halves = torch.arange(d, dtype=torch.float64) / 2
    psi = torch.digamma(p.df.unsqueeze(-1) / 2 - halves).sum(-1)
    ratio = q.precision_matrix @ torch.linalg.inv(p.precision_matrix)
    trace = ratio.diagonal(dim1=-2, dim2=-1).sum(-1)
    gammas = torch.mvlgamma(q.df / 2, d) - torch.mvlgamma(p.df / 2, d)
    logs = gammas - q.df / 2 * torch.logdet(ratio) + (p.df - q.df) / 2 * psi
    return logs + p.df / 2 * (trace - d)


def scalars(*values: float) -> Natural:
    return tuple(torch.tensor([v], dtype=torch.float64) for v in values)


def vector(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


NAN, INF = float("nan"), float("inf")

CASES = [
    Case(
        f.GAMMA,
        lambda g: (positive(g) - 1, -positive(g)),
        (scalars(-1.0, -1.0), scalars(0.0, 0.0), scalars(-2.0, -1.0), scalars(NAN, -1.0)),
        degrees=2,
    ),
    Case(
        f.INVERSE_GAMMA,
        lambda g: (-positive(g) - 1, -positive(g)),
        (scalars(-1.0, -1.0), scalars(-2.0, 0.0), scalars(0.0, -1.0), scalars(-2.0, -INF)),
        degrees=2,
    ),
    Case(
        f.BETA,
        lambda g: (positive(g) - 1, positive(g) - 1),
        (scalars(-1.0, 0.0), scalars(0.0, -1.5), scalars(INF, 0.0)),
        degrees=2,
    ),
    Case(
        f.DIRICHLET,
        lambda g: (positive(g, 3) - 1,),
        ((vector(0.0, -1.0, 1.0),), (vector(-3.0, 0.0, 0.0),), (vector(NAN, 0.0, 0.0),)),
        degrees=3,
    ),
    Case(
        f.CATEGORICAL,
        lambda g: (torch.randn((BATCH, 3), generator=g, dtype=torch.float64) + 5,),
        ((vector(0.0, -INF, 0.0),), (vector(0.0, NAN, 0.0),)),
        bounded=False,
        degrees=2,
    ),
    Case(
        f.BERNOULLI,
        lambda g: (torch.randn(BATCH, generator=g, dtype=torch.float64),),
        (scalars(INF), scalars(NAN)),
        bounded=False,
    ),
    Case(
        f.GAUSSIAN,
        lambda g: gaussian(g, 3),
        (
            (vector(0.0, 0.0), torch.zeros(1, 2, 2)),
            (vector(0.0, 0.0), torch.diag_embed(vector(-1.0, 0.1))),
            (vector(NAN, 0.0), -torch.eye(2)[None]),
            (vector(0.0, 0.0), torch.full((1, 2, 2), NAN)),
        ),
        degrees=9,
    ),
    Case(
        f.GAUSSIAN,
        lambda g: gaussian(g, 1),
        ((vector(0.0), torch.zeros(1, 1, 1)), (vector(0.0), torch.ones(1, 1, 1))),
        degrees=2,
    ),
    Case(
        f.WISHART,
        lambda g: wishart(g, 3),
        (
            (torch.zeros(1, 2, 2), *scalars(0.0)),
            (-torch.eye(2)[None], *scalars(-1.0)),
            (torch.diag_embed(vector(-1.0, 0.1)), *scalars(0.0)),
            (torch.full((1, 2, 2), NAN), *scalars(0.0)),
            (-torch.eye(2)[None], *scalars(INF)),
        ),
        degrees=7,
    ),
    Case(
        f.WISHART,
        lambda g: wishart(g, 1),
        ((torch.zeros(1, 1, 1), *scalars(0.0)), (-torch.ones(1, 1, 1), *scalars(-2.0))),
        degrees=2,
    ),
]
