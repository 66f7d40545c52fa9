"""Local latents: blocks inside a plate of which a run holds some elements only.

The posterior of such a block is kept for all elements of the plate; a run sees a *window* of it, the
elements that its plate holds. Both are laid out alike, element by element, so that a window is a
selection along the plate's axis.

Shapes: with plates of full sizes (N1, N2, ...) a discrete, Gamma, ... site keeps (*batch, *event) with
the full sizes in the place of the window's; a Gaussian block keeps (N1 N2 ... c, d, d), where every
cell of the plates holds c independent Gaussians of width d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.symbolic import Latent

__all__ = [
    "FamilyPlacement",
    "GaussianPlacement",
    "Part",
    "Placement",
    "Window",
    "gaussian_placement",
    "whole_latent",
]


@dataclass(frozen=True)
class Part:
    """A plate that holds `size` of its `full` elements in a run; `dim` is negative.

    In a subsampled plate each element stands for `scale` of them; in a chunk of new data, for itself.
    """

    name: str
    dim: int
    size: int
    full: int
    scale: float = 1.0


class Placed(NamedTuple):
    """A site of a Gaussian block: its shape in a window, and how many of its dims are batch dims."""

    name: str
    shape: tuple[int, ...]
    batch: int


Window = Mapping[str, Tensor]
"""For each such plate the indices of the elements it holds."""


def whole_latent(latent: Latent, parts: Sequence[Part]) -> Latent:
    """The latent with all elements of the plates."""
    batch, shape = list(latent.batch_shape), list(latent.shape)
    for p in parts:
        batch[p.dim] = p.full
        shape[len(batch) + p.dim] = p.full
    ref = replace(latent.ref, shape=tuple(shape))
    sizes = {p.name: p.full for p in parts}
    plates = tuple((n, d, sizes.get(n, s), f) for n, d, s, f in latent.plates)
    return replace(latent, ref=ref, batch_shape=tuple(batch), plates=plates)


@dataclass(frozen=True, eq=False)
class Placement:
    """How a block's tensors for a window lie in those for all elements."""

    parts: tuple[Part, ...]

    def take(self, whole: tuple[Tensor, ...], window: Window) -> tuple[Tensor, ...]:
        """The window's part of the tensors."""
        raise NotImplementedError

    def put(self, whole: tuple[Tensor, ...], tensors: tuple[Tensor, ...], window: Window) -> None:
        """Write the window's part, in place."""
        raise NotImplementedError

    def spread(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors for all elements, each like the first of the window."""
        first = {p.name: torch.zeros(p.full, dtype=torch.long, device="cpu") for p in self.parts}
        return tuple(t.clone() for t in self.take(tensors, first))

    def fresh(
        self, new: tuple[Tensor, ...], old: tuple[Tensor, ...], seen: Tensor
    ) -> tuple[Tensor, ...]:
        """`old` where an element of the window has been seen, else `new`; `seen` is over the plates."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FamilyPlacement(Placement):
    """A site of any family but the Gaussian: tensors (*batch, *event)."""

    event_dims: tuple[int, ...]

    def take(self, whole: tuple[Tensor, ...], window: Window) -> tuple[Tensor, ...]:
        result = []
        for t, n in zip(whole, self.event_dims, strict=True):
            for p in self.parts:
                t = t.index_select(t.ndim - n + p.dim, window[p.name].to(t.device))
            result.append(t)
        return tuple(result)

    def put(self, whole: tuple[Tensor, ...], tensors: tuple[Tensor, ...], window: Window) -> None:
        for w, t, n in zip(whole, tensors, self.event_dims, strict=True):
            index = [torch.arange(size, device=w.device) for size in w.shape]
            for p in self.parts:
                index[w.ndim - n + p.dim] = window[p.name].to(w.device)
            grid = [i.reshape(-1, *[1] * (w.ndim - 1 - k)) for k, i in enumerate(index)]
            w[tuple(grid)] = t

    def fresh(
        self, new: tuple[Tensor, ...], old: tuple[Tensor, ...], seen: Tensor
    ) -> tuple[Tensor, ...]:
        result = []
        for a, b, n in zip(new, old, self.event_dims, strict=True):
            batch = b.ndim - n
            shape = [1] * batch
            for p, size in zip(self.parts, seen.shape, strict=True):
                shape[p.dim] = size
            order = sorted(range(len(self.parts)), key=lambda i: self.parts[i].dim)
            mask = seen.permute(order).reshape(*shape, *[1] * n)
            result.append(torch.where(mask, b, a))
        return tuple(result)


@dataclass(frozen=True, eq=False)
class GaussianPlacement(Placement):
    """A Gaussian block: tensors (cells * count, ...), cell after cell.

    `rank` and `position` say for every scalar of a cell in which of the cell's Gaussians, and where in
    it, the scalar stands.
    """

    sites: tuple[Placed, ...]
    rank: dict[str, Tensor]
    position: dict[str, Tensor]
    count: int
    width: int

    def layout(self, sizes: Mapping[str, int]) -> Layout:
        """The block's layout when the plates hold this many elements."""
        shapes, elements, positions = {}, {}, {}
        cells = math.prod(sizes[p.name] for p in self.parts)
        for x in self.sites:
            shape = list(x.shape)
            for p in self.parts:
                shape[x.batch + p.dim] = sizes[p.name]
            device = self.rank[x.name].device
            cell, rest = _coordinates(x._replace(shape=tuple(shape)), self.parts, device)
            shapes[x.name] = tuple(shape)
            elements[x.name] = (cell * self.count + self.rank[x.name][rest]).reshape(-1)
            positions[x.name] = self.position[x.name][rest].reshape(-1)
        names = tuple(x.name for x in self.sites)
        return Layout(names, shapes, elements, positions, cells * self.count, self.width)

    def _elements(self, window: Window) -> Tensor:
        cell = torch.zeros((), dtype=torch.long, device="cpu")
        for p in self.parts:
            cell = cell.unsqueeze(-1) * p.full + window[p.name].cpu()
        return (cell.reshape(-1, 1) * self.count + torch.arange(self.count, device="cpu")).reshape(
            -1
        )

    def take(self, whole: tuple[Tensor, ...], window: Window) -> tuple[Tensor, ...]:
        index = self._elements(window)
        return tuple(t.index_select(0, index.to(t.device)) for t in whole)

    def put(self, whole: tuple[Tensor, ...], tensors: tuple[Tensor, ...], window: Window) -> None:
        index = self._elements(window)
        for w, t in zip(whole, tensors, strict=True):
            w[index.to(w.device)] = t

    def spread(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        cells = math.prod(p.full for p in self.parts)
        return tuple(t[: self.count].repeat(cells, *[1] * (t.ndim - 1)) for t in tensors)

    def fresh(
        self, new: tuple[Tensor, ...], old: tuple[Tensor, ...], seen: Tensor
    ) -> tuple[Tensor, ...]:
        mask = seen.reshape(-1, 1).expand(-1, self.count).reshape(-1)
        return tuple(
            torch.where(mask.reshape(-1, *[1] * (b.ndim - 1)), b, a)
            for a, b in zip(new, old, strict=True)
        )


def _coordinates(
    site: Placed, parts: Sequence[Part], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which cell of the plates each scalar is in, and which scalar of its cell it is."""
    shape = site.shape
    axes = [site.batch + p.dim for p in parts]
    cell = torch.zeros([1] * len(shape), dtype=torch.long, device=device)
    for a in axes:
        steps = torch.arange(shape[a], device=device)
        cell = cell * shape[a] + steps.reshape([-1 if i == a else 1 for i in range(len(shape))])
    rest_shape = [1 if i in axes else n for i, n in enumerate(shape)]
    rest = torch.arange(math.prod(rest_shape), device=device).reshape(rest_shape)
    return cell.expand(shape), rest.expand(shape)


def gaussian_placement(
    latents: Sequence[Latent], parts: tuple[Part, ...], component: Tensor, max_dense_dim: int
) -> GaussianPlacement:
    """From the connected components of one window's scalars (site after site): its Gaussians.

    Where the cells of the plates are not alike, each cell is one Gaussian, diagonal if it is too large.
    """
    sites = tuple(Placed(x.name, x.shape, len(x.batch_shape)) for x in latents)
    cells = [_coordinates(x, parts, component.device)[0].reshape(-1) for x in sites]
    cell = torch.cat(cells)
    _, group = torch.unique(component, return_inverse=True)
    owner = torch.zeros(int(group.max()) + 1, dtype=torch.long, device=cell.device)
    owner[group] = cell
    if not torch.equal(owner[group], cell):
        _raise_joined(sites, parts)
    layout = Layout.from_components({x.name: x.shape for x in latents}, component)
    found = None if layout is None else _pattern(sites, parts, layout)
    if found is not None and found.width <= max_dense_dim:
        return found
    sizes = {}
    for x in sites:
        axes = {x.batch + p.dim for p in parts}
        sizes[x.name] = math.prod(size for i, size in enumerate(x.shape) if i not in axes)
    width = sum(sizes.values())
    place = torch.arange(width, device=component.device).split(list(sizes.values()))
    own = dict(zip(sizes, place, strict=True))
    none = {n: torch.zeros_like(t) for n, t in own.items()}
    if width > max_dense_dim:
        return GaussianPlacement(parts, sites, own, none, width, 1)
    return GaussianPlacement(parts, sites, none, own, 1, width)


def _pattern(
    sites: tuple[Placed, ...], parts: tuple[Part, ...], layout: Layout
) -> GaussianPlacement | None:
    cells = math.prod(p.size for p in parts)
    if cells == 0 or layout.count % cells:
        return None
    count = layout.count // cells
    device = layout.element[sites[0].name].device
    cell_of = torch.full((layout.count,), -1, device=device)
    where = {}
    for x in sites:
        cell, rest = _coordinates(x, parts, device)
        where[x.name] = (cell.reshape(-1), rest.reshape(-1))
        element = layout.element[x.name]
        cell_of[element] = where[x.name][0]
    order = torch.argsort(cell_of, stable=True)
    if not bool((torch.bincount(cell_of, minlength=cells) == count).all()):
        return None
    rank_of = torch.empty_like(cell_of)
    rank_of[order] = torch.arange(layout.count, device=cell_of.device) % count
    rank, position = {}, {}
    for x in sites:
        cell, rest = where[x.name]
        n = int(rest.max()) + 1
        here = rank_of[layout.element[x.name]]
        rank[x.name] = torch.zeros(n, dtype=torch.long, device=here.device)
        position[x.name] = torch.zeros_like(rank[x.name])
        rank[x.name][rest] = here
        position[x.name][rest] = layout.position[x.name]
        same = torch.equal(rank[x.name][rest], here)
        if not same or not torch.equal(position[x.name][rest], layout.position[x.name]):
            return None
    return GaussianPlacement(parts, sites, rank, position, count, layout.width)


def _raise_joined(sites: Sequence[Placed], parts: Sequence[Part]) -> None:
    names = ", ".join(f"'{p.name}'" for p in parts)
    raise CVIError(
        f"latent site '{sites[0].name}'",
        f"a factor joins its values in different elements of the subsampled plate {names}",
        "elements of a subsampled plate that are independent given the sites outside of it",
        "run on the whole plate at once (no subsample_size)",
    )
