"""When a Gaussian block is a process: a prior kept as it is, and pseudo-observations of predictors.

The optimum of a Gaussian posterior has the precision of its prior plus A^T Lambda A, where A z are the
values that the other factors see. With fewer such values than scalars (more columns than rows), or a
prior covariance that should not be inverted (a Gaussian process), this form is smaller, better
conditioned, and loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import IDENTITY, Const, SiteRef, Stat, Term, align
from pyro_cvi.estimators.affine import Selection, design_of
from pyro_cvi.estimators.moments import Structure
from pyro_cvi.families import GAUSSIAN, peel
from pyro_cvi.gaussians import Layout
from pyro_cvi.gaussians.process import Predictors
from pyro_cvi.graph.symbolic import Factor, Latent
from pyro_cvi.graph.views import (
    Coupling,
    NoViewError,
    Root,
    Viewed,
    couplings,
    labels_of,
    rewritten,
    stat_of,
    touching,
    view_layout,
)

__all__ = ["Process", "process_of"]

_KERNEL = 50
"""Fewest scalars of a prior covariance that is not to be inverted; for smaller ones it does no harm."""
_WIDE = 200
"""Fewest scalars of a block with a diagonal prior for which the form is looked for."""
_RATIO = 1.5
"""Scalars for each predictor from which on it is the cheaper one."""
_ROWS = 2
"""Most predictors for each scalar of a prior that is kept as a covariance."""
_SCALARS = 1 << 27
"""Most scalars of a design that is put together of the user's tensors."""
_FEW = 500
"""Predictors that cost nothing, however many for each scalar."""
_BATCHED = 600
"""Most scalars of a plate of such priors: beyond, each is a Gaussian of its own."""
_LARGEST = 12_000
"""Most predictors: a matrix of all pairs of them is held."""


@dataclass(frozen=True, eq=False)
class Process:
    """A block's predictors, and the names of the parts of its leaves, in order.

    `learnt` are prior_loc and prior_tril with their gradients, where the model has parameters in them.
    """

    kind: ClassVar[str] = "process"
    predictors: Predictors
    parts: tuple[str, ...]
    reason: str
    learnt: tuple[Tensor, Tensor] | None = None


@dataclass
class _Read:
    """A root, its rows of A and what it is multiplied by; `rows` over the root's varying axes."""

    root: Root
    key: tuple[str, Any]
    coefficient: float = 1.0


def process_of(
    name: str,
    sites: Sequence[str],
    latents: Mapping[str, Latent],
    factors: Sequence[Factor],
    kept: bool = False,
) -> tuple[Process, Viewed] | None:
    """The block as a process and its factors rewritten, or None where another form serves better.

    With `kept`, the block is a process already, and is one again if that is at all possible.
    """
    size = sum(math.prod(latents[s].shape) for s in sites)
    closed = [s for s in sites if _is_kernel(latents[s], factors)]
    large = [s for s in closed if latents[s].shape[-1] >= _KERNEL]
    if not kept and not large and size <= _WIDE:
        return None
    batched = any(math.prod(latents[s].shape[:-1]) > 1 for s in closed)
    if not kept and batched and size > _BATCHED:
        return None  # small Gaussians of their own cost less than all of them in one
    try:
        return _Builder(name, sites, latents, closed).build(factors, size, kept)
    except NoViewError:
        return None


def _is_kernel(latent: Latent, factors: Sequence[Factor]) -> bool:
    """Whether the prior is a multivariate normal that no other latent enters."""
    core = peel(latent.prior)
    if not isinstance(core, torch.distributions.MultivariateNormal) or latent.transform is not None:
        return False
    own = [f for f in factors if f.name == latent.name]
    if len(own) != 1 or own[0].expression.sites != {latent.name} or own[0].forced:
        return False
    return not isinstance(own[0].weight, Tensor) and own[0].weight == 1 and not own[0].enumerated


class _Builder:
    def __init__(
        self, name: str, sites: Sequence[str], latents: Mapping[str, Latent], closed: list[str]
    ) -> None:
        self.name, self.sites, self.latents, self.closed = name, list(sites), latents, closed
        shapes = {s: latents[s].shape for s in sites}
        device = latents[sites[0]].value.device
        self.layout = Layout.dense(shapes, device)
        self.scratch = Structure(
            dict.fromkeys(sites, GAUSSIAN), dict.fromkeys(sites, name), {name: self.layout}
        )
        like = latents[sites[0]].value
        for s in sites[1:]:
            like = like.to(torch.promote_types(like.dtype, latents[s].value.dtype))
        self.like = like.detach()
        is_closed = torch.zeros(self.layout.width, dtype=torch.bool, device=device)
        for s in closed:
            is_closed[self.layout.flat(s)] = True
        self.is_closed = is_closed
        self.kept, self.rows = False, 0
        self.counted: set[tuple[int, ...]] = set()
        self.selected: list[Tensor] = []
        self.designs: list[tuple[Tensor, Tensor]] = []

    def build(
        self, factors: Sequence[Factor], size: int, kept: bool
    ) -> tuple[Process, Viewed] | None:
        self.kept = kept
        names = frozenset(self.sites)
        near = [f for f in touching(factors, names) if f.name not in self.closed]
        self._check_priors(near)
        found = [[self._reads(c) for c in couplings(f.expression, names)] for f in near]
        rows = sum(len(m) for m, _ in self.designs)
        columns = (
            torch.unique(torch.cat(self.selected))
            if self.selected
            else self.is_closed.new_zeros(0).long()
        )
        rows += len(columns)
        wide = size > _WIDE and size > _RATIO * rows
        large = any(self.latents[s].shape[-1] >= _KERNEL for s in self.closed)
        kernel = large and (rows <= _ROWS * size or rows <= _FEW)
        if not rows or rows > _LARGEST or not (wide or kernel or kept):
            return None
        return self._assembled(near, found, columns)

    def _check_priors(self, near: Sequence[Factor]) -> None:
        """Give up where a prior joins open scalars: the diagonal P is to be positive."""
        own = {f.name: f for f in near}
        for s in self.sites:
            if s in self.closed:
                continue
            f = own.get(s)
            if f is None or isinstance(f.weight, Tensor):
                raise NoViewError("a prior that is masked, or none")
            for c in couplings(f.expression, frozenset(self.sites)):
                if not self._sees_one(c, [self._column(r) for r in c]):
                    raise NoViewError("a prior that joins scalars")

    # --- what is read ------------------------------------------------------------------------------

    def _flat(self, stat: Stat) -> Tensor:
        return self.layout.flat(stat.site.name)[stat.index]

    def _reads(self, coupling: Coupling) -> list[_Read] | None:
        """The rows that a coupling needs; None if each cell sees one open scalar only."""
        columns = [self._column(r) for r in coupling]
        if self._sees_one(coupling, columns):
            return None
        reads = []
        for root, column in zip(coupling, columns, strict=True):
            if column is not None:
                self.selected.append(column.reshape(-1))
                reads.append(_Read(root, ("selection", column)))
            else:
                reads.append(self._design(root))
        return reads

    def _column(self, root: Root) -> Tensor | None:
        """The one scalar that each cell of a root reads, over its varying axes; None if more."""
        if len(root.terms) != 1:
            return None
        (t,) = root.terms
        if root.labels is not None and t.contracted:
            return None
        stat = stat_of(t)
        return align(self._flat(stat), stat.axes, root.varying)

    def _sees_one(self, coupling: Coupling, columns: Sequence[Tensor | None]) -> bool:
        first = columns[0]
        if first is None or any(c is None for c in columns) or not self._is_one(coupling, columns):
            return False
        return not bool(self.is_closed[first].any())

    def _is_one(self, coupling: Coupling, columns: Sequence[Tensor | None]) -> bool:
        if len(coupling) == 1:
            return True
        labels = labels_of(coupling)
        placed = [
            _placed(c, r, labels) for c, r in zip(columns, coupling, strict=True) if c is not None
        ]
        return all(bool((p == placed[0]).all()) for p in placed)

    def _count(self, root: Root) -> None:
        """Give up before a design is built that has more rows than the form is good for."""
        tensors = tuple(
            id(o.tensor) for t in root.terms for o in t.operands if isinstance(o, Const)
        )
        if tensors in self.counted:
            return
        if tensors:  # the same inputs again are the same rows
            self.counted.add(tensors)
        sizes = {
            a: n
            for t in root.terms
            for o in t.operands
            for a, n in zip(o.axes, o.shape, strict=True)
            if a in root.varying
        }
        self.rows += math.prod(sizes.values())
        size = self.layout.width
        most = max(_ROWS * size, _FEW) if self.closed else size / _RATIO
        if not self.kept and self.rows > most:
            raise NoViewError("as many predictors as scalars")

    def _design(self, root: Root) -> _Read:
        self._count(root)
        design = design_of(list(root.terms), self.scratch, self.name, _SCALARS)
        if design is None:
            raise NoViewError("a design matrix that would be too large")
        if isinstance(design, Selection):
            design = design.dense()
        if design.axes != root.varying:
            raise NoViewError("a design of other axes")
        if design.matrix.requires_grad:
            raise NoViewError("learnt inputs")
        matrix = design.matrix.reshape(-1, design.matrix.shape[-1])
        for i, (known, at) in enumerate(self.designs):
            if known is matrix or (
                known.shape == matrix.shape
                and known.data_ptr() == matrix.data_ptr()
                and torch.equal(at, design.columns)
            ):
                return _Read(root, ("design", (i, design.matrix.shape[:-1])), design.coefficient)
        self.designs.append((matrix, design.columns))
        return _Read(
            root, ("design", (len(self.designs) - 1, design.matrix.shape[:-1])), design.coefficient
        )

    # --- the rewritten factors ---------------------------------------------------------------------

    def _assembled(
        self, near: list[Factor], found: list[list[list[_Read] | None]], columns: Tensor
    ) -> tuple[Process, Viewed]:
        starts, at = [], len(columns)
        for matrix, _ in self.designs:
            starts.append(at)
            at += len(matrix)

        def rows_of(read: _Read) -> Tensor:
            kind, what = read.key
            if kind == "selection":
                return torch.searchsorted(columns, what)
            i, shape = what
            n = math.prod(shape)
            return torch.arange(starts[i], starts[i] + n, device=columns.device).reshape(shape)

        elements = _Elements(at)
        placed = [
            [
                None if reads is None else elements.note(reads, [rows_of(r) for r in reads])
                for reads in each
            ]
            for each in found
        ]
        order, widths, counts = elements.finish()
        names = [
            f"{self.name}: predictors" if w == 1 else f"{self.name}: groups of {w}" for w in widths
        ]
        refs = {
            w: SiteRef(n, (c, w), 0, "real") for w, c, n in zip(widths, counts, names, strict=True)
        }
        factors = {}
        for f, each, handles in zip(near, found, placed, strict=True):
            answers = [
                [r.terms for r in coupling]
                if reads is None
                else elements.answers(reads, handle, refs)
                for coupling, reads, handle in zip(
                    couplings(f.expression, frozenset(self.sites)), each, handles, strict=True
                )
            ]
            own = frozenset(self.sites) & f.expression.sites
            behind = {ref.name: own for ref in refs.values()}
            new = rewritten(f.expression, frozenset(self.sites), iter(answers))
            factors[f.name] = replace(f, expression=new, behind={**f.behind, **behind})
        prior_loc, prior_tril = self._prior()
        spec = self._predictors(
            columns, order, widths, counts, prior_loc.detach(), prior_tril.detach()
        )
        layouts: dict[str, Layout] = {}
        parts = []
        if len(spec.open):
            parts.append(self.name)
            layouts[self.name] = self._open_layout(spec.open)
        for w, c, n in zip(widths, counts, names, strict=True):
            parts.append(n)
            layouts[n] = view_layout(n, c, w, columns.device)
        what = f"{spec.size:,} scalars seen through {spec.rows:,} predictors"
        reason = f"{what}; the prior covariance is not inverted" if self.closed else what
        learnt = None
        if prior_loc.requires_grad or prior_tril.requires_grad:
            learnt = (prior_loc, prior_tril)
        process = Process(spec, tuple(parts), reason, learnt)
        return process, Viewed(layouts, factors, tuple(self.closed))

    def _prior(self) -> tuple[Tensor, Tensor]:
        """prior_loc and prior_tril of all closed scalars, in the order of the block."""
        found = [_kernel(self.latents[s]) for s in self.closed]
        if not found:
            return self.like.new_zeros(0), self.like.new_zeros(0, 0)
        dtype = self.like.dtype
        loc = torch.cat([x.to(dtype) for x, _ in found])
        trils = [x.to(dtype) for _, x in found]
        return loc, trils[0] if len(trils) == 1 else torch.block_diag(*trils)

    def _predictors(
        self, columns: Tensor, order: Tensor, widths: tuple[int, ...], counts: tuple[int, ...],
        prior_loc: Tensor, prior_tril: Tensor,
    ) -> Predictors:  # fmt: skip
        size, dtype = self.layout.width, self.like.dtype
        everything = torch.arange(size, device=columns.device)
        alone = not len(columns) and len(self.designs) == 1
        if (
            alone
            and torch.equal(self.designs[0][1], everything)
            and torch.equal(order, torch.arange(len(order), device=order.device))
        ):
            design = self.designs[0][0].detach().to(dtype)
        else:
            pieces = [torch.zeros(len(columns), size, dtype=dtype, device=columns.device)]
            pieces[0][torch.arange(len(columns), device=columns.device), columns] = 1.0
            for matrix, at in self.designs:
                wide = torch.zeros(len(matrix), size, dtype=dtype, device=columns.device)
                wide[:, at] = matrix.detach().to(dtype)
                pieces.append(wide)
            design = torch.cat(pieces)[order]
        closed = self.is_closed.nonzero().squeeze(-1)
        opened = (~self.is_closed).nonzero().squeeze(-1)
        return Predictors(design, widths, counts, opened, closed, prior_loc, prior_tril)

    def _open_layout(self, scalars: Tensor) -> Layout:
        place = torch.full((self.layout.width,), -1, dtype=torch.long, device=scalars.device)
        place[scalars] = torch.arange(len(scalars), device=scalars.device)
        element = {s: place[self.layout.flat(s)] for s in self.sites if s not in self.closed}
        shapes = {s: self.latents[s].shape for s in element}
        position = {s: torch.zeros_like(e) for s, e in element.items()}
        return Layout(tuple(element), shapes, element, position, len(scalars), 1)


def _kernel(latent: Latent) -> tuple[Tensor, Tensor]:
    """(loc, scale_tril) of a multivariate normal prior, flattened; independent ones on the diagonal."""
    core: Any = peel(latent.prior)
    n = latent.shape[-1]
    batch = math.prod(latent.shape[:-1])
    loc = core.loc.expand(latent.shape).reshape(-1)
    tril = core._unbroadcasted_scale_tril
    if batch == 1:
        return loc, tril.reshape(n, n)
    each = tril.expand(*latent.shape[:-1], n, n).reshape(batch, n, n)
    return loc, torch.block_diag(*each)


def _placed(values: Tensor, root: Root, labels: tuple[int, ...]) -> Tensor:
    """Values over the root's varying axes, aligned with the coupling's."""
    own = tuple(root.outer(a) for a in root.varying)
    return align(values, own, labels)


class _Elements:
    """Groups of rows that meet in one cell: which groups there are, and how cells refer to them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.noted: list[tuple[int, Tensor]] = []

    def note(
        self, reads: list[_Read], rows: list[Tensor]
    ) -> tuple[tuple[int, ...], list[int], int, tuple[int, ...]]:
        """Register a coupling; what is returned is handed back to `answers`."""
        roots = [r.root for r in reads]
        labels = labels_of(roots)
        placed = [_placed(x, r, labels) for x, r in zip(rows, roots, strict=True)]
        distinct: list[Tensor] = []
        which = []
        for p in placed:
            same = [i for i, d in enumerate(distinct) if d.shape == p.shape and torch.equal(d, p)]
            if not same:
                distinct.append(p)
            which.append(same[0] if same else len(distinct) - 1)
        shape = torch.broadcast_shapes(*(d.shape for d in distinct))
        cells = torch.stack([d.expand(shape).reshape(-1) for d in distinct], -1)
        self.noted.append((len(distinct), cells))
        return labels, which, len(self.noted) - 1, tuple(shape)

    def finish(self) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """Rows in the order of groups and elements, and the widths and counts of the groups."""
        widths = tuple(sorted({w for w, _ in self.noted}))
        self.index: dict[int, Tensor] = {}
        order, counts = [], []
        for w in widths:
            members = [i for i, (own, _) in enumerate(self.noted) if own == w]
            every = torch.cat([self.noted[i][1] for i in members])
            found, inverse = torch.unique(every, dim=0, return_inverse=True)
            order.append(found.reshape(-1))
            counts.append(len(found))
            sizes = [len(self.noted[i][1]) for i in members]
            for i, part in zip(members, inverse.split(sizes), strict=True):
                self.index[i] = part
        return torch.cat(order), widths, tuple(counts)

    def answers(
        self, reads: list[_Read], handle: Any, refs: Mapping[int, SiteRef]
    ) -> list[tuple[Term, ...]]:
        """The terms that stand for each root."""
        labels, which, i, shape = handle
        width = self.noted[i][0]
        element = self.index[i].reshape(shape)
        result: list[tuple[Term, ...]] = []
        for read, position in zip(reads, which, strict=True):
            root = read.root
            axes = tuple(root.inner(label) for label in labels)
            stat = Stat(refs[width], IDENTITY, element * width + position, axes)
            if read.key[0] == "selection":
                (t,) = root.terms
                consts = tuple(o for o in t.operands if isinstance(o, Const))
                result.append((Term(t.coefficient, (*consts, stat)),))
            else:
                result.append((Term(read.coefficient, (stat,)),))
        return result
