"""Which discrete sites meet in a factor: the dims they are enumerated along, and the chains they form.

Two discrete sites may share an enumeration dim unless some factor depends on both. That is found by a
run in which the discrete values are LatentTensors without an algebra: whatever is computed from them
is opaque in them, so every density names the sites it depends on. A chain z_1 - z_2 - ... needs two
dims however long it is.

Sites of a chain whose only common factors join neighbours are one block with exact forward-backward;
otherwise discrete sites are independent of each other in the posterior.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.algebra.evaluate import OpaqueError, evaluate, point_reader
from pyro_cvi.errors import CVIError
from pyro_cvi.graph.check import agree
from pyro_cvi.graph.symbolic import Call, Factor, Latent, Symbolic

__all__ = ["Dependence", "chains", "check_branches", "check_plates", "shares_dims", "with_dims"]

Dependence = Mapping[str, frozenset[str]]
"""For each factor the discrete sites it depends on."""
_MOST_DIMS = 24
"""Tensors may have 64 dims, but the model's own ops on the values need some of them."""


def with_dims(call: Call, factors: Sequence[str], known: Dependence | None = None) -> Call:
    """The call with an enumeration dim for each discrete site, shared where that is possible.

    `known` is what an earlier run with the same factors found.
    """
    discrete = [n for n, x in call.latents.items() if x.support is not None]
    if not discrete:
        return call
    depends = known
    if depends is None or set(depends) != set(factors):
        depends = _dependence(call, discrete, factors)
    meets = _neighbours(discrete, depends)
    colour: dict[str, int] = {}
    for n in discrete:
        taken = {colour[m] for m in meets[n] if m in colour}
        colour[n] = next(c for c in itertools.count() if c not in taken)
    latents: dict[str, Latent] = {}
    for n, x in call.latents.items():
        latents[n] = x if n not in colour else replace(x, enum_dim=-1 - call.nesting - colour[n])
    for n in discrete:
        _check_dim(latents[n], meets[n])
    return replace(call, latents=latents, depends=depends)


def _dependence(call: Call, discrete: Sequence[str], factors: Sequence[str]) -> Dependence:
    """From one run; a model that cannot run on such values is taken to join all its sites."""
    for one_state in (True, False):
        with suppress(Exception):
            return call.dependence(one_state=one_state)
    return {n: frozenset(discrete) for n in factors}


def _neighbours(discrete: Sequence[str], depends: Dependence) -> dict[str, set[str]]:
    meets: dict[str, set[str]] = {n: set() for n in discrete}
    for sites in depends.values():
        for n in sites:
            meets[n] |= sites - {n}
    return meets


def _check_dim(latent: Latent, meets: set[str]) -> None:
    if latent.enum_dim is not None and -latent.enum_dim > _MOST_DIMS:
        raise CVIError(
            f"latent site '{latent.name}'",
            f"it would be enumerated along dim {latent.enum_dim}, for factors join it to "
            f"{len(meets)} other discrete sites",
            f"at most {_MOST_DIMS} dims of plates and of discrete sites that meet in one factor",
            "put independent discrete sites into one plate: one site of many elements needs one "
            "dim",
        )


def shares_dims(latents: Mapping[str, Latent]) -> bool:
    """Whether two discrete sites are enumerated along one dim."""
    dims = [x.enum_dim for x in latents.values() if x.enum_dim is not None]
    return len(set(dims)) < len(dims)


def check_plates(call: Call, symbolic: Symbolic) -> None:
    """A discrete site is enumerated element by element: what reads it stands in its plates.

    A sum over the plate, or one element read outside of it, would join states that are tried one by one.
    """
    try:
        depends = call.dependence(one_state=True)
    except Exception:
        return  # `check_branches` compares the densities themselves
    for f in symbolic.factors:
        for n in sorted(depends.get(f.name, frozenset())):
            latent = symbolic.latents.get(n)
            if latent is None or latent.support is None or n in f.forced:
                continue
            outside = [p for p, _, size, _ in latent.plates if size > 1 and p not in f.plates]
            if outside:
                raise CVIError(
                    f"site '{f.name}'",
                    f"it reads elements of the discrete site '{n}' outside of plate '{outside[0]}'",
                    "each element of a discrete site read on its own, inside of its plates",
                    f"make the elements that meet sites of their own (a Python loop in place of the "
                    f"plate around '{n}')",
                )


def check_branches(symbolic: Symbolic, run: poutine.Trace, values: Mapping[str, Tensor]) -> None:
    """The enumerated densities, read at the states of a plain run, are the densities of that run.

    Sites that share a dim would be confused if some factor depended on both unseen.
    """
    point = {n: run.nodes[n]["value"] for n in symbolic.latents}
    for f in symbolic.factors:
        try:
            with torch.no_grad():
                mine = evaluate(f.expression, point_reader(point)).expand(f.expression.shape)
        except OpaqueError:
            continue
        for n in f.enumerated:
            mine = _at_state(mine, symbolic.latents[n], point[n])
        at = [point[n] for n in f.expression.sites]
        if not agree(mine, values[f.name], run.nodes[f.name]["mask"], at):
            raise CVIError(
                f"site '{f.name}'",
                f"its density at given states of {sorted(f.enumerated) or 'the discrete sites'} is "
                "not the one found when all states are tried at once",
                "a density that reads each element of a discrete site on its own, through tensors",
                "replace .item(), numpy and Python branches on discrete values by indexing or "
                "torch.where, and a plate whose elements meet in one density by a Python loop",
            )


def _at_state(values: Tensor, latent: Latent, state: Tensor) -> Tensor:
    """The branch of a table that a site's own value took."""
    dim, support = latent.enum_dim, latent.support
    assert dim is not None and support is not None
    flat = support.reshape(len(support), -1)
    here = state.reshape(*latent.batch_shape, 1, -1)
    index = (here == flat).all(-1).to(torch.long).argmax(-1)
    index = index.reshape(*[1] * (values.ndim - index.ndim), *index.shape)
    return torch.take_along_dim(values, index, dim)


def chains(latents: Mapping[str, Latent], factors: Sequence[Factor]) -> list[tuple[str, ...]]:
    """Chains of discrete sites, in program order.

    All sites of a chain have the same plates and number of states, and every factor reads one site of
    it, or two neighbours. A site is joined to a parent (a site in its own prior) first; sites that only
    a likelihood joins form chains of what is left.
    """
    order = {n: i for i, n in enumerate(latents)}
    own = {f.name: f.enumerated for f in factors}
    together = {frozenset(f.enumerated) for f in factors if len(f.enumerated) > 1}
    meets: dict[str, set[str]] = {}
    for sites in together:
        for n in sites:
            meets.setdefault(n, set()).update(sites)
    path: dict[str, list[str]] = {}
    for only_parents in (True, False):
        for n in sorted(meets, key=order.__getitem__):
            near = own.get(n, ()) if only_parents else tuple(meets[n])
            if len(path.get(n, [n])) == 1:
                _append(n, [a for a in near if order[a] < order[n]], path, order, latents)
    paths = {id(p): p for p in path.values() if len(p) > 1}
    place = {n: (i, k) for i, p in paths.items() for k, n in enumerate(p)}
    broken = {i for sites in together for i in _misfits(sites, place)}
    return [tuple(p) for i, p in paths.items() if i not in broken]


def _append(
    site: str,
    near: list[str],
    path: dict[str, list[str]],
    order: Mapping[str, int],
    latents: Mapping[str, Latent],
) -> None:
    """Join a site to the latest of the sites near it that ends a path."""
    for a in sorted(near, key=order.__getitem__, reverse=True):
        before = path.setdefault(a, [a])
        if before[-1] == a and _alike(latents[a], latents[site]):
            before.append(site)
            path[site] = before
            return


def _alike(a: Latent, b: Latent) -> bool:
    assert a.support is not None and b.support is not None
    return a.batch_shape == b.batch_shape and len(a.support) == len(b.support)


def _misfits(sites: frozenset[str], place: Mapping[str, tuple[int, int]]) -> set[int]:
    """The paths on which a factor reads more than one site, unless these are two neighbours."""
    on: dict[int, list[int]] = {}
    for n in sites:
        if n in place:
            on.setdefault(place[n][0], []).append(place[n][1])
    return {i for i, ks in on.items() if max(ks) - min(ks) > 1 or len(ks) > 2}
