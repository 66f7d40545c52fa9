"""Which sites share a posterior block, and how a Gaussian block is laid out.

Gaussian sites that meet additively in a factor belong in one block, for their joint posterior is
Gaussian given the rest; sites that multiply each other (z @ W) must stay apart. Within a block the
scalars split into connected components: scalars that no factor cell joins are independent in the
optimum, so a plate of local effects costs one small Gaussian per element and nothing is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_cvi.algebra.cumulate import in_innovations
from pyro_cvi.algebra.reason import Cause, Reason
from pyro_cvi.errors import CVIError
from pyro_cvi.families import GAUSSIAN
from pyro_cvi.gaussians import Layout, partition
from pyro_cvi.graph.chain import Chain, chain_of
from pyro_cvi.graph.joining import joined
from pyro_cvi.graph.likeness import Foes, Turns
from pyro_cvi.graph.meetings import Coupling, couplings, opaque_sites
from pyro_cvi.graph.process import Process, process_of
from pyro_cvi.graph.symbolic import Factor, Latent
from pyro_cvi.graph.views import Viewed
from pyro_cvi.graph.windows import GaussianPlacement, Part, gaussian_placement

__all__ = ["Form", "GaussianBlock", "block_label", "gaussian_blocks"]

_SLICES = 1 << 26
"""Most scalars of the covariances of a site that is split into slices."""

Form = Process | Chain
"""The forms of a block that its factors see through views."""


@dataclass(frozen=True, eq=False)
class GaussianBlock:
    """Sites, layout, and the reason for the structure; `placement` for sites in a subsampled plate."""

    sites: tuple[str, ...]
    layout: Layout
    reason: Reason
    placement: GaussianPlacement | None = None
    form: Form | None = None
    viewed: Viewed | None = None


def gaussian_blocks(
    latents: Mapping[str, Latent],
    factors: Sequence[Factor],
    turns: Sequence[Turns],
    max_dense_dim: int,
    parts: Mapping[str, tuple[Part, ...]],
    plain: frozenset[str],
    drawn: frozenset[str],
    foes: Foes,
) -> tuple[list[GaussianBlock], list[Factor]]:
    """Group the Gaussian sites into blocks, and the factors, also given as `turns`, as they see them.

    Blocks with a site of `plain` have no structure that needs views; those with a site of `drawn`, which
    is sampled, are split no further than into single scalars. `foes` may not share a block, and nor may
    those that multiply each other, or are in different subsampled plates.
    """
    every = {n: latent for n, latent in latents.items() if latent.family is GAUSSIAN}
    gaussian = {n: x for n, x in every.items() if not (x.held or x.diagonal or x.joint)}
    opaque = [set(o) & set(gaussian) for o in opaque_sites(turns)]
    groups = joined(gaussian, turns, foes, parts)
    blocks = [_held(x, max_dense_dim, parts.get(n, ())) for n, x in every.items() if x.held]
    blocks += [_diagonal(x, parts.get(n, ())) for n, x in every.items() if x.diagonal]
    blocks += _joint([x for x in every.values() if x.joint], parts)
    viewed: dict[str, GaussianBlock] = {}
    if not any(parts.values()):
        for group in groups:
            found = None if plain & set(group) else _viewed(group, latents, factors)
            if found is not None and found.viewed is not None:
                viewed[group[0]] = found
                factors = found.viewed.seen(factors)
    # What no views serve is laid out by the scalars that meet, with cumulative sums written out.
    seen = {n for b in viewed.values() for n in b.sites}
    refs = {n: latent.ref for n, latent in gaussian.items() if n not in seen}
    rest = [f for f in factors if f.expression.sites & set(refs)]
    met = couplings([replace(f, expression=in_innovations(f.expression)) for f in rest], refs)
    by_site: dict[str, list[int]] = {n: [] for n in gaussian}
    for i, c in enumerate(met):
        for n in {s.site.name for s in c}:
            by_site[n].append(i)
    for group in groups:
        relevant = sorted({i for n in group for i in by_site[n]})
        near = [met[i] for i in relevant]
        if parts.get(group[0]):
            blocks.append(_local(group, gaussian, near, opaque, max_dense_dim, parts[group[0]]))
        elif group[0] in viewed:
            blocks.append(viewed[group[0]])
        else:
            hidden = drawn.union(*opaque)
            made = _layouts(group, gaussian, near, opaque, max_dense_dim, hidden)
            lossy = any(b.reason.cause is Cause.TOO_LARGE for b in made)
            if lossy and not any(parts.values()) and not plain & set(group):
                chain = _viewed(group, latents, factors, max_dense_dim)
                if chain is not None and chain.viewed is not None:
                    made = [chain]
                    factors = chain.viewed.seen(factors)
            blocks += made
    return blocks, list(factors)


def _held(latent: Latent, max_dense_dim: int, parts: tuple[Part, ...]) -> GaussianBlock:
    """The block of a site that keeps its prior: independent scalars that never move."""
    n, alone = latent.name, {latent.name: latent}
    if parts:
        block = _local([n], alone, [], [], max_dense_dim, parts)
    else:
        (block,) = _layouts([n], alone, [], [], max_dense_dim, frozenset())
    return replace(block, reason=Reason("held at its prior"))


def _diagonal(latent: Latent, parts: tuple[Part, ...]) -> GaussianBlock:
    """The block of a site whose scalars are to be independent."""
    if parts:
        raise CVIError(
            f"latent site '{latent.name}'",
            f"infer={{'posterior': 'diagonal'}} in the subsampled plate '{parts[0].name}'",
            "a site outside of subsampled plates, as the weights of a network",
            "leave it out for this site",
        )
    shapes = {latent.name: latent.shape}
    count = math.prod(latent.shape)
    layout = Layout.from_components(shapes, torch.arange(count, device=latent.value.device))
    layout = layout or Layout.dense(shapes, latent.value.device)
    return GaussianBlock(
        (latent.name,), replace(layout, kind="diagonal"), Reason("as infer asks for")
    )


def _joint(latents: Sequence[Latent], parts: Mapping[str, tuple[Part, ...]]) -> list[GaussianBlock]:
    """The one block of all sites that are to be joint: a dense covariance."""
    if not latents:
        return []
    for latent in latents:
        if parts.get(latent.name):
            raise CVIError(
                f"latent site '{latent.name}'",
                "infer={'posterior': 'joint'} in the subsampled plate "
                f"'{parts[latent.name][0].name}'",
                "sites outside of subsampled plates",
                "leave it out for this site",
            )
    layout = Layout.dense({x.name: x.shape for x in latents}, latents[0].value.device)
    reason = "one Gaussian of their unconstrained values: factors that are approximated tie them"
    return [GaussianBlock(tuple(x.name for x in latents), layout, Reason(reason))]


def _local(
    sites: list[str],
    gaussian: Mapping[str, Latent],
    couplings: Sequence[Coupling],
    opaque: Sequence[set[str]],
    max_dense_dim: int,
    parts: tuple[Part, ...],
) -> GaussianBlock:
    """A block inside subsampled plates: Gaussians of each element of the plates."""
    shapes = {n: gaussian[n].shape for n in sites}
    device = gaussian[sites[0]].value.device
    component = _components(shapes, couplings, opaque, device)
    placement = gaussian_placement([gaussian[n] for n in sites], parts, component, max_dense_dim)
    names = ", ".join(f"'{p.name}'" for p in parts)
    reason = (
        f"{placement.count} of {placement.width} scalars for each element of {names}, on its own"
    )
    layout = placement.layout({p.name: p.size for p in parts})
    return GaussianBlock(tuple(sites), layout, Reason(reason), placement)


def _viewed(
    sites: list[str],
    latents: Mapping[str, Latent],
    factors: Sequence[Factor],
    widest: int | None = None,
) -> GaussianBlock | None:
    """The block in a form that its factors see through views, where there is a better one for it.

    `widest` says that there was none, and that no more scalars than these may be dense.
    """
    name = block_label(sites, latents)
    found: tuple[Form, Viewed] | None = None
    if widest is None:
        found = process_of(name, sites, latents, factors)
    found = found or chain_of(name, sites, latents, factors, widest=widest)
    if found is None:
        return None
    form, viewed = found
    shapes = {n: latents[n].shape for n in sites}
    layout = Layout.dense(shapes, latents[sites[0]].value.device)
    return GaussianBlock(
        tuple(sites),
        replace(layout, kind=form.kind),
        Reason(form.reason),
        form=form,
        viewed=viewed,
    )


def block_label(sites: Sequence[str], latents: Mapping[str, Latent]) -> str:
    """A block's name: that of its site, or of the first few, and never that of another site."""
    if len(sites) == 1:
        return sites[0]
    name = "+".join(sites[:3]) + ("+..." if len(sites) > 3 else "")
    while name in latents:
        name += "+"
    return name


def _layouts(
    sites: list[str],
    gaussian: Mapping[str, Latent],
    couplings: Sequence[Coupling],
    opaque: Sequence[set[str]],
    max_dense_dim: int,
    drawn: frozenset[str],
) -> list[GaussianBlock]:
    shapes = {n: gaussian[n].shape for n in sites}
    device = gaussian[sites[0]].value.device
    layout, reason = _layout(shapes, couplings, opaque, max_dense_dim, device)
    if layout is not None:
        return [GaussianBlock(tuple(sites), layout, Reason(reason))]
    if len(sites) > 1:
        # Too large together: as many of the small sites as fit share a block, then the next ones;
        # what is lost is the correlation between these blocks.
        group = _smallest(sites, shapes, max_dense_dim)
        rest = [n for n in sites if n not in group]
        result = []
        for part in (group, rest):
            for block in _layouts(part, gaussian, couplings, opaque, max_dense_dim, drawn):
                why = block.reason
                if why.cause is not Cause.TOO_LARGE:
                    beyond = f"; with {_others(sites, part)} it would exceed max_dense_dim"
                    why = Reason(why.text + beyond, Cause.TOO_LARGE)
                result.append(GaussianBlock(block.sites, block.layout, why))
        return result
    (site,) = sites
    count = math.prod(shapes[site])
    component = torch.arange(count, device=device)
    if site not in drawn:
        component = _slices(shapes[site], max_dense_dim, device)
    split = Layout.from_components(shapes, component)
    assert split is not None
    what = "diagonal"
    if split.width > 1:
        split = replace(split, kind="sliced")
        what = f"{split.count} slices of {split.width}"
    reason = f"{what}: {count} coupled scalars are more than max_dense_dim={max_dense_dim}"
    return [GaussianBlock(tuple(sites), split, Reason(reason, Cause.TOO_LARGE))]


def _slices(shape: tuple[int, ...], max_dense_dim: int, device: torch.device) -> Tensor:
    """Which slice of a site each of its scalars is in: the widest slices that are small enough.

    Of those that are as wide, those along the last axes: the columns of a matrix of weights, one for
    each class. Without any every scalar is by itself.
    """
    count = math.prod(shape)
    index = torch.arange(count, device=device).reshape(shape)
    best = (1, index.reshape(-1))
    for n in range(1, len(shape)):
        for axes in itertools.combinations(reversed(range(len(shape))), n):
            width = math.prod(shape[i] for i in range(len(shape)) if i not in axes)
            if best[0] < width <= max_dense_dim and count * width <= _SLICES:
                inside = [i for i in range(len(shape)) if i not in axes]
                best = (width, index.amin(inside, keepdim=True).expand(shape).reshape(-1))
    return best[1]


def _smallest(
    sites: list[str], shapes: Mapping[str, tuple[int, ...]], max_dense_dim: int
) -> list[str]:
    """The smallest sites that fit into one dense block together (at least one, never all)."""
    total = 0
    chosen: set[str] = set()
    for n in sorted(sites, key=lambda n: math.prod(shapes[n]))[:-1]:
        total += math.prod(shapes[n])
        if chosen and total > max_dense_dim:
            break
        chosen.add(n)
    return [n for n in sites if n in chosen]


def _others(sites: list[str], group: list[str]) -> str:
    rest = [f"'{n}'" for n in sites if n not in group]
    return ", ".join(rest[:3]) + (" ..." if len(rest) > 3 else "")


def _layout(
    shapes: dict[str, tuple[int, ...]],
    couplings: Sequence[Coupling],
    opaque: Sequence[set[str]],
    max_dense_dim: int,
    device: torch.device,
) -> tuple[Layout | None, str]:
    total = sum(math.prod(s) for s in shapes.values())
    if total == 0:
        return Layout.dense(shapes, device), "empty"
    component = _components(shapes, couplings, opaque, device)
    if int(component.max()) > 0:
        layout = Layout.from_components(shapes, component)
        if layout is not None and layout.width <= max_dense_dim:
            what = f"{layout.count} independent parts of {layout.width}"
            return layout, f"{what}: no factor joins them"
    if total <= max_dense_dim:
        return Layout.dense(shapes, device), "joined by a factor" if len(shapes) > 1 else "one site"
    return None, ""


def _components(
    shapes: dict[str, tuple[int, ...]],
    couplings: Sequence[Coupling],
    opaque: Sequence[set[str]],
    device: torch.device,
) -> Tensor:
    offset, start = {}, 0
    for n, s in shapes.items():
        offset[n] = start
        start += math.prod(s)
    joint = []
    for c in couplings:
        reads = [
            (s.index + offset[s.site.name], s.axes)
            for s in c
            if s.site.name in shapes and s.index.numel()
        ]
        if reads:
            cells = tuple(sorted({a for _, axes in reads for a in axes if a < 0}))
            joint.append((cells, reads))
    for names in opaque:
        inside = [n for n in names if n in shapes]
        reads = [
            (torch.arange(math.prod(shapes[n]), device=device) + offset[n], (1,)) for n in inside
        ]
        if reads:
            joint.append(((), reads))
    return partition(start, joint, device)
