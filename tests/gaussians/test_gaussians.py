"""Quadratic forms against the naive product, layouts, and components against union-find."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from pyro_cvi.gaussians import Layout, partition, quadratic, row_quadratic
from pyro_cvi.updates import GaussianBelief

CPU = torch.device("cpu")


def spd(d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(d, d, dtype=torch.float64)
    return (root @ root.mT + torch.eye(d)).to(dtype)


@pytest.mark.parametrize("chunk", [1 << 20, 7])
@pytest.mark.parametrize("shape", [(30, 4), (1, 1), (0, 3), (5, 0), (3, 8)], ids=str)
def test_row_quadratic_and_its_gradient_are_those_of_the_naive_product(
    shape: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quadratic, "_CHUNK", chunk)
    a, cov = torch.randn(shape), spd(shape[1]).requires_grad_()
    got, want = row_quadratic(a, cov), torch.einsum("ni,ij,nj->n", a, cov, a)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(shape[0])
    (g,) = torch.autograd.grad(got @ cotangent, cov)
    (h,) = torch.autograd.grad(want @ cotangent, cov)
    torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-12)


def test_row_quadratic_of_float32_data_has_the_precision_of_the_covariance() -> None:
    a, cov = torch.randn(20, 5).float(), spd(5)
    got = row_quadratic(a, cov)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, row_quadratic(a.double(), cov))


def test_row_quadratic_differentiates_learnt_inputs() -> None:
    a, cov = torch.randn(6, 3, requires_grad=True), spd(3).requires_grad_()
    assert torch.autograd.gradcheck(row_quadratic, (a, cov))


def test_a_dense_layout_reads_its_sites_one_after_another() -> None:
    layout = Layout.dense({"a": (2, 2), "b": (), "c": (0,)}, CPU)
    assert (layout.count, layout.width, layout.size, layout.structure) == (1, 5, 5, "dense")
    assert layout.flat("a").tolist() == [0, 1, 2, 3]
    assert layout.flat("b").tolist() == [4]
    assert layout.flat("c").tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_of_components_is_a_bijection_that_keeps_components_apart(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    component = torch.arange(4).repeat_interleave(3)[torch.randperm(12, generator=generator)]
    layout = Layout.from_components({"a": (2, 3), "b": (6,)}, component)
    assert layout is not None
    assert (layout.count, layout.width) == (4, 3)
    flat = torch.cat([layout.flat("a"), layout.flat("b")])
    assert sorted(flat.tolist()) == list(range(12))
    element = torch.cat([layout.element["a"], layout.element["b"]])
    same = component[:, None] == component
    assert torch.equal(element[:, None] == element, same)


def test_components_of_unequal_size_have_no_layout() -> None:
    assert Layout.from_components({"a": (3,)}, torch.tensor([0, 0, 1])) is None


Coupling = tuple[tuple[int, ...], list[tuple[Tensor, tuple[int, ...]]]]


def random_coupling(rng: random.Random, size: int) -> Coupling:
    """One or two reads of up to three axes; negative ones are cells, positive ones sums."""
    sizes = {a: rng.randint(1, 3) for a in (-3, -2, -1, 1, 2)}
    reads = []
    for _ in range(rng.randint(1, 3)):
        axes = tuple(rng.sample(sorted(sizes), rng.randint(0, 3)))
        shape = [sizes[a] for a in axes]
        count = 1
        for n in shape:
            count *= n
        index = torch.tensor([rng.randrange(size) for _ in range(count)]).reshape(shape)
        reads.append((index, axes))
    cells = tuple(sorted({a for _, axes in reads for a in axes if a < 0}))
    return cells, reads


def union_find(size: int, couplings: list[Coupling]) -> list[int]:
    parent = list(range(size))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for cells, reads in couplings:
        extent = {
            a: n for index, axes in reads for a, n in zip(axes, index.shape, strict=True) if a < 0
        }
        for cell in itertools.product(*(range(extent[a]) for a in cells)):
            where = dict(zip(cells, cell, strict=True))
            members: list[int] = []
            for index, axes in reads:
                slices = tuple(where[a] if a < 0 else slice(None) for a in axes)
                members += index[slices].reshape(-1).tolist()
            for m in members:
                a, b = sorted((root(members[0]), root(m)))
                parent[b] = a
    return [root(i) for i in range(size)]


@pytest.mark.parametrize("seed", range(200))
def test_components_are_those_of_union_find(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 30)
    couplings = [random_coupling(rng, size) for _ in range(rng.randint(0, 4))]
    assert partition(size, couplings, CPU).tolist() == union_find(size, couplings)


def test_a_long_chain_is_one_component() -> None:
    n = 300
    pairs = [((-1,), [(torch.arange(n - 1), (-1,)), (torch.arange(1, n), (-1,))])]
    assert int(partition(n, pairs, CPU).max()) == 0


def test_a_turned_target_has_absolute_curvatures_and_is_a_way_up() -> None:
    """Eigenvalues relative to the old precision: absolute, and at least a quarter; the slope stays."""
    root = torch.randn(3, 4, 4)
    old = GaussianBelief(torch.randn(3, 4), root @ root.mT + torch.eye(4))
    slope, curvature = torch.randn(3, 4), torch.randn(3, 4, 4)
    curvature = curvature + curvature.mT
    new_slope, turned = old.turned([slope, curvature])
    assert new_slope is slope

    def relative(g: Tensor) -> Tensor:
        inverse = torch.linalg.inv(old.factor)
        return torch.linalg.eigvalsh(inverse @ (-2 * g) @ inverse.mT)

    wanted = relative(curvature).abs().clamp(min=0.25).sort().values
    torch.testing.assert_close(relative(turned).sort().values, wanted)
    moved, step = old.moved([slope, turned], 1.0)
    assert not step.improper
    assert bool((((moved.loc - old.loc) * slope).sum(-1) > 0).all())
    good = old.turned([slope, -0.5 * 2 * old.precision])
    torch.testing.assert_close(good[1], -old.precision)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_element_whose_target_is_not_finite_stays(bad: float) -> None:
    old = GaussianBelief(torch.randn(2, 3), torch.eye(3).expand(2, 3, 3))
    slope, curvature = torch.ones(2, 3), -torch.eye(3).expand(2, 3, 3).clone()
    slope[1, 0], curvature[1, 0, 0] = bad, bad
    new, step = old.moved([slope, curvature], 1.0)
    assert step.improper == 1
    assert torch.equal(new.loc[1], old.loc[1])
    assert torch.equal(new.precision[1], old.precision[1])
    assert torch.allclose(new.precision[0], 2 * torch.eye(3))
    assert torch.allclose(new.loc[0], old.loc[0] + 0.5)
