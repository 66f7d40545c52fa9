"""Where the scalars of a Gaussian block's sites sit: a batch of B independent d-dimensional Gaussians.

One layout serves all dense-in-the-small structures: dense is B = 1, diagonal is d = 1, plated is one
Gaussian per plate element. Scalar i of a site is coordinate `position[i]` of element `element[i]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Read = tuple[Tensor, tuple[int, ...]]
CellIndices = tuple[tuple[int, ...], list[Read]]
"""The cell axes of one affine expression, and the scalars each of its terms reads."""

__all__ = ["Layout", "partition"]


@dataclass(frozen=True, eq=False)
class Layout:
    """B elements of width d; per site the element and the position of each of its scalars.

    Shapes: `element[site]`, `position[site]` are (numel of the site,).
    """

    sites: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    element: dict[str, Tensor]
    position: dict[str, Tensor]
    count: int
    width: int
    kind: str = ""

    @property
    def structure(self) -> str:
        """Dense, diagonal or plated; or its `kind`: of a block that is sliced, or seen through views."""
        if self.kind:
            return self.kind
        if self.count <= 1:
            return "dense"
        return "diagonal" if self.width == 1 else "plated"

    @property
    def size(self) -> int:
        """The number of scalars of the block."""
        return self.count * self.width

    def flat(self, site: str) -> Tensor:
        """Position of the site's scalars in `loc.reshape(-1)`."""
        return self.element[site] * self.width + self.position[site]

    @staticmethod
    def dense(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Layout:
        """All scalars of all sites in one Gaussian, site after site."""
        position, start = {}, 0
        for site, shape in shapes.items():
            n = math.prod(shape)
            position[site] = torch.arange(start, start + n, device=device)
            start += n
        element = {site: torch.zeros_like(p) for site, p in position.items()}
        return Layout(tuple(shapes), dict(shapes), element, position, 1, start)

    @staticmethod
    def from_components(shapes: dict[str, tuple[int, ...]], component: Tensor) -> Layout | None:
        """One element per connected component; None unless all have one size."""
        names, element, counts = torch.unique(component, return_inverse=True, return_counts=True)
        if names.numel() == 0 or int(counts.min()) != int(counts.max()):
            return None
        width = int(counts[0])
        order = torch.argsort(element, stable=True)
        position = torch.empty_like(element)
        position[order] = torch.arange(element.numel(), device=element.device) % width
        sizes = [math.prod(shape) for shape in shapes.values()]
        elements = dict(zip(shapes, element.split(sizes), strict=True))
        positions = dict(zip(shapes, position.split(sizes), strict=True))
        return Layout(tuple(shapes), dict(shapes), elements, positions, names.numel(), width)


def partition(size: int, couplings: Sequence[CellIndices], device: torch.device) -> Tensor:
    """Connected components of `size` scalars, as the least member of each scalar's component.

    Every coupling is one affine expression: `(axis sizes, [(index, index axes), ...])` with negative
    axes for its cells and positive ones for scalars summed into each cell. Scalars of one cell are
    joined.
    """
    label = torch.arange(size, device=device)
    couplings = [(c, [(index.to(device), axes) for index, axes in r]) for c, r in couplings]
    while True:
        before = label
        for cell_axes, reads in couplings:
            label = _join(label, cell_axes, reads)
        label = label[label]
        if torch.equal(before, label):
            return label


def _join(
    label: Tensor, cells: tuple[int, ...], reads: list[tuple[Tensor, tuple[int, ...]]]
) -> Tensor:
    least: Tensor | None = None
    for index, axes in reads:
        here = _to_cells(label[index], axes, cells)
        least = here if least is None else torch.minimum(least, here)
    if least is None:
        return label
    for index, axes in reads:
        value = least
        for i, a in enumerate(cells):
            if a not in axes:
                value = value.amin(i, keepdim=True)
        own = [a for a in axes if a < 0]
        value = value.reshape([s for s, a in zip(value.shape, cells, strict=True) if a in own])
        order = [a for a in cells if a in own]
        sizes = iter(value.shape)
        value = value.permute([order.index(a) for a in axes if a < 0])
        sizes = iter(value.shape)
        value = value.reshape([next(sizes) if a < 0 else 1 for a in axes]).expand(index.shape)
        label = label.scatter_reduce(0, index.reshape(-1), value.reshape(-1), "amin")
    return label


def _to_cells(value: Tensor, axes: tuple[int, ...], cells: tuple[int, ...]) -> Tensor:
    inner = [i for i, a in enumerate(axes) if a > 0]
    if inner:
        value = value.amin(inner)
    outer = [a for a in axes if a < 0]
    value = value.permute([outer.index(a) for a in cells if a in outer])
    sizes = iter(value.shape)
    return value.reshape([next(sizes) if a in outer else 1 for a in cells])
