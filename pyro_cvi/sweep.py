"""One sweep over the blocks of a plan: what each block's step is, and whether it is taken.

- Exact messages: rho = 1, the block's optimum given the rest.
- Quadrature: rho = 1, halved until the ELBO rises by KL(q || q') / rho, as a mirror step must.
- Sampled: Robbins-Monro steps, undone where they clearly lose; of one size, and averaged, as soon as
  they come no nearer to the optimum (`Averaging`). On minibatches, at most rho_t as below after two
  passes.
- Minibatches: the local blocks take their steps first; then the others take a full step with messages
  of all rows (`SiteMessages`), or one of rho_t = (t + delay)^-forget with this batch's alone. Exact
  messages are kept by batch from the first batch on. Those by quadrature serve once every row has been
  seen: kept by row where a row sees one predictor (`RowSites`), else by batch if batches return. The
  second rule is for the first pass, for streams, whose rows have no identity, and for batches that are
  mixed anew where messages depend on the posterior and are not kept by row: shares of old ones are too
  noisy. At the end of a pass that held every element once there are none, and exact messages take a
  full step again.

References: M. E. Khan, W. Lin (2017), arXiv 1703.04265, algorithms 1 and 2; M. D. Hoffman et al. (2013),
Stochastic variational inference, JMLR 14, for the order of local and global steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.acceleration import Anderson, Mixing
from pyro_cvi.algebra.reason import Cause
from pyro_cvi.ascent import ascend
from pyro_cvi.averaging import Averaging
from pyro_cvi.climb import climb
from pyro_cvi.distributed import Shards
from pyro_cvi.errors import CVIError, CVIWarning, message
from pyro_cvi.families import concentrated
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.prepared import Prepared
from pyro_cvi.graph.sampling import Estimate, Sampler
from pyro_cvi.graph.stored import Batches, SiteMessages
from pyro_cvi.graph.windows import Part
from pyro_cvi.linalg import or_zeros, sum_gradients
from pyro_cvi.searching import NOTICED, SLACK, Rho, searched
from pyro_cvi.start import start
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief, Step

__all__ = ["Sweeper", "is_of", "shift_of"]

_HALVINGS = 40
_NARROWINGS = 8
_SHAKE = 0.1
"""Standard deviation of the noise in the logits of an annealed fit, ..."""
_SHAKEN = 4
"""... which is added in one of so many steps."""
_ROUNDING = 1e4
"""How many units of rounding of its parts the bound may lose in an exact step."""
_TERMS = 16
"""The same in units of rounding of the terms that its parts are sums of."""
_MOST_ROUNDS = 20
"""Rounds over the local blocks of a minibatch, where there is more than one."""
_SETTLED = 1e-4
"""Nats per element of the plate below which local blocks have settled."""
_MOST_LOST = 10
"""Steps in a row that a block may lose to messages that are not finite."""
_FINAL_DRAWS = 32
"""Fewest draws that decide whether an average is taken."""
_TRUST = 4.0
"""Factor by which a sampled step may change shape and mean of a Gamma."""
_FIRST, _WARM, _SHARES = 0.1, 20, 16
"""Step t of diagonal posteriors that infer asks for has the size 0.1 (1 + t / 20)^-0.7 with 16 batches
in a pass. The noise of a message grows with their number: with p times as many, steps are p times
smaller and fall p times later; with fewer they only fall later, as correlated scalars take long."""
_EARLY = 2
"""Passes after which sampled steps on minibatches follow the stochastic rule, if they are longer."""
_WIDE = 64
"""Scalars of a sampled Gaussian block beyond which the number of draws does not follow by itself."""
_LOCAL_CLIMB = 25
"""Steps in which the points climb that sampled local blocks of a minibatch begin around."""
_LOCAL_ROUNDS = 4
"""Most steps of these blocks, before the others see the minibatch."""
_LOCALLY_SETTLED = 0.01
"""Nats per scalar by which a step moves them below which they have settled."""
_DAMPED = 0.5
"""Step size of blocks that quadrature serves, with messages of batches: no bound is there to test it."""

_CHECKED = (4, 16, 64, 256)
"""Passes after which the bound of a minibatch is compared with that of the start."""
_FAR = 1.0
"""Relative fall of the bound that is a divergence."""

Gradient = list[Tensor | None]


class _Remembered(NamedTuple):
    """What is kept of a plate, and its part in this batch: with weights if not all elements count."""

    memory: SiteMessages
    part: Part
    weights: Tensor | None


class Sweeper:
    """The steps of a fit and what they remember of each other: step sizes, controls, site messages.

    Arguments:
        minibatch: "stored" keeps each batch's messages where they fit into memory, "stochastic" never.
        delay, forget: of the stochastic rule, rho_t = (t + delay)^-forget for t = 0, 1, ...
        seed: of the draws; None takes torch's random state.
        memory: passes that the stochastic rule remembers at most, where its targets `drifts`.
        shards: of several processes, which take the same steps and draw the same numbers.
    """

    def __init__(
        self, minibatch: str, delay: float, forget: float, seed: int | None = None,
        memory: float = math.inf, shards: Shards | None = None,
    ) -> None:  # fmt: skip
        self.minibatch, self.delay, self.forget = minibatch, delay, forget
        self.memory = memory
        self.shards = shards or Shards()
        self.seed = seed
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed)
        self.time = 0
        self.temperature = 1.0
        self.accelerated = False
        self.mixing = Mixing.NEVER
        self.is_mixture = False
        self.seeded = True
        self.located: Collection[str] = ()
        self.is_stream = False
        self.drifts = self.is_conditional = False
        self.beside: frozenset[str] = frozenset()
        self.along: Callable[[Evaluator], dict[str, Gradient]] | None = None
        self.counts: dict[str, Step] = {}
        self.control: dict[str, tuple[Tensor, ...]] = {}
        self.sampled_value = self.error = 0.0
        self._rho: dict[str, Rho] = {}
        self._rate = 0.5
        self._held: float | None = None
        self._ahead: tuple[Plan | None, dict[str, Any], Estimate] | None = None
        self.averaging = Averaging()
        self._memory: SiteMessages | None = None
        self._batches: dict[str, Batches] = {}
        self._lost: dict[str, int] = {}
        self._anderson = Anderson()
        self._mapped: Plan | None = None
        self._targets: dict[str, Belief] = {}
        self._observed: Estimate | None = None
        self._stationary = False
        self._origin: dict[str, Belief] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Settings, step sizes, controls, averages, and the draws that the next step uses again.

        What only saves work is left out.
        """
        ahead = None
        if self._ahead is not None:
            _, beliefs, estimate = self._ahead
            ahead = (None, {n: b.tensors for n, b in beliefs.items()}, estimate)
        passing: dict[str, Any] = {
            "_ahead": ahead,
            "_mapped": None,
            "_targets": {},
            "_anderson": Anderson(),
            "along": None,
        }
        return {**self.__dict__, **passing}

    def fresh(self) -> Sweeper:
        """Another one with the same settings and other draws, and with nothing remembered."""
        new = Sweeper(self.minibatch, self.delay, self.forget, self.seed, self.memory, self.shards)
        new._seeds = self._seeds
        return new

    def next_seed(self) -> int:
        """Of the next draws."""
        return self.shards.seed(int(torch.randint(2**31, (), generator=self._seeds, device="cpu")))

    # --- minibatches -------------------------------------------------------------------------------

    def chosen(self, before: Prepared | None) -> dict[str, Tensor]:
        """The elements that subsampled plates should see next; none for plates not met before."""
        parts = {} if before is None else before.parts
        return {n: b.next(parts[n].size) for n, b in self._batches.items() if n in parts}

    def done(self, prepared: Prepared) -> None:
        """A step was taken: count it, and go on to the next batch."""
        self.time += 1
        for name, part in prepared.parts.items():
            if name not in prepared.given and part.scale != 1:
                if name not in self._batches:
                    self._batches[name] = Batches(part.full, prepared.window[name])
                self._batches[name].done(part.size)

    def undo(self, control: dict[str, tuple[Tensor, ...]]) -> None:
        """Forget a step that failed."""
        self.control = control
        self._ahead = None
        if self._memory is not None:
            self._memory.undo()

    # --- a sweep -----------------------------------------------------------------------------------

    def sweep(
        self,
        evaluator: Evaluator,
        prepared: Prepared,
        sampler: Callable[[], Sampler],
        *,
        fitted: bool,
        unseen: bool,
    ) -> None:
        """Move every block once.

        `fitted` says that the posterior comes from an earlier fit, `unseen` that the present minibatch
        holds elements that none before it held.
        """
        plan, before = prepared.plan, dict(evaluator.beliefs)
        self._targets.clear()
        self.is_mixture = False
        self.sampled_value = self.error = 0.0
        for part in evaluator.parts:
            part.temperature = self.temperature
        noisy = plan.noisy()
        if self.time == 0 and not fitted and self.seeded:
            first, *others = evaluator.parts
            start(first, self.trying, self.located)
            for part in others:
                for name, belief in first.beliefs.items():
                    part.set(name, belief)
        if self.time == 0 and not fitted and not noisy and not plan.stochastic:
            cells = prepared.observed_cells
            ascend(evaluator, cells, prepared.call, self.trying, self.located)
        fresh = bool(noisy) and unseen
        if self.time == 0 and not fitted and noisy:
            fresh = False
            climb(evaluator, sampler(), [b for b in plan.blocks if self._may_climb(b, noisy)])
        if self.temperature > 1 and self.time % _SHAKEN == 0:
            _shake(evaluator)
        if plan.stochastic:
            if self.time == 0 and not noisy:
                outer = {b.name for b in plan.blocks if not self.is_local(plan, b)}
                self._origin = {n: b for n, b in evaluator.beliefs.items() if n in outer}
            self._minibatch(evaluator, prepared, noisy, fitted)
            self._warn_if_lost(evaluator, prepared)
        else:
            for block in plan.blocks:
                if block.moves and block.name not in noisy:
                    self.deterministic(evaluator, block)
        if noisy and plan.drawn:
            self._drawn(evaluator, prepared, sampler(), noisy, fresh)
        elif noisy:
            self._sampled(evaluator, prepared, sampler(), noisy, fresh)
        elif (
            self.mixing is not Mixing.NEVER
            and not (plan.stochastic or plan.learns)
            and self.temperature == 1
        ):
            self._mix(evaluator, before)

    def _mix(self, evaluator: Evaluator, before: dict[str, Belief]) -> None:
        """Take the mixture with earlier sweeps in the place of this one, if its bound is higher."""
        if self._mapped is not evaluator.plan:  # another map, with other fixed points
            own = frozenset(b.name for b in evaluator.plan.blocks if evaluator.is_own(b))
            self._anderson, self._mapped = Anderson(self.shards, own), evaluator.plan
        plain, known = dict(evaluator.beliefs), evaluator.elbo()
        mixed = self._anderson.propose(before, {**plain, **self._targets}, known, self.mixing)
        if mixed is None:
            return
        changed = [n for n, b in mixed.items() if b is not plain[n]]
        kept = {n: evaluator.kept(n) for n in changed}
        for name in changed:
            evaluator.set(name, mixed[name])
        slack = evaluator.rounding_of_bound() if self.mixing is Mixing.NOW else 0.0
        self.is_mixture = taken = evaluator.elbo() > known - slack
        self._anderson.judged(taken)
        if not taken:
            for name in changed:
                evaluator.restore(name, kept[name])

    def _may_climb(self, block: Block, noisy: frozenset[str]) -> bool:
        return block.name in noisy and block.moves and not set(block.sites) & set(self.located)

    def deterministic(self, evaluator: Evaluator, block: Block) -> None:
        """The step of a block with exact messages or quadrature."""
        if evaluator.plan.is_exact(block):
            self._exact(evaluator, block)
        else:
            self._searched(evaluator, block)

    def trying(self, evaluator: Evaluator, block: Block) -> None:
        """The same, without the check of an exact step: starts take hundreds that are thrown away."""
        if evaluator.plan.is_exact(block):
            evaluator.set(block.name, self._target(evaluator, block))
        else:
            self._searched(evaluator, block)

    def settle(
        self,
        evaluator: Evaluator,
        noisy: frozenset[str] = frozenset(),
        *,
        rounds: int = _MOST_ROUNDS,
        settled: float = _SETTLED,
    ) -> None:
        """Bring the local blocks to their optimum given the others, and each draw of other guides."""
        for part in evaluator.parts:
            self._settle(part, noisy, rounds, settled)

    def _settle(
        self, evaluator: Evaluator, noisy: frozenset[str], rounds: int, settled: float
    ) -> None:
        plan = evaluator.plan
        local = [
            b for b in plan.blocks if b.moves and b.name not in noisy and self.is_local(plan, b)
        ]
        once = len(local) == 1 and plan.is_exact(local[0])
        for _ in range(1 if once else rounds):
            moved = 0.0
            for block in local:
                old = evaluator.beliefs[block.name]
                self.deterministic(evaluator, block)
                new = evaluator.beliefs[block.name]
                if not once and new is not old:
                    moved = max(moved, float(old.kl(new)) / _elements(block))
            if moved < settled:
                return

    def is_local(self, plan: Plan, block: Block) -> bool:
        """Whether a block is of single elements: of a minibatch, or of what other guides draw."""
        plates = [{n for n, *_ in plan.latents[s].plates} for s in block.sites]
        return bool(block.placement) or all(p & self.beside for p in plates)

    def _minibatch(
        self, evaluator: Evaluator, prepared: Prepared, noisy: frozenset[str], fitted: bool
    ) -> None:
        plan = prepared.plan
        outer = [b for b in plan.blocks if b.moves and b.name not in noisy]
        outer = [b for b in outer if not self.is_local(plan, b)]
        seen, rate = self._remembered(prepared, outer, fitted), self.rate
        if seen is None:
            rate = max(rate, self._least_rate(prepared))
        if self.time == 0 and not fitted and _is_symmetric(plan):
            # The start of a discrete site breaks the symmetry of a mixture only if the others look at
            # it before it moves.
            self._outside(evaluator, outer, seen, 1.0, {})
        self.settle(evaluator, noisy)
        further = {} if self.along is None else self.along(evaluator)
        self._outside(evaluator, outer, seen, rate, further)

    def _warn_if_lost(self, evaluator: Evaluator, prepared: Prepared) -> None:
        """After 4, 16, ... passes: is this minibatch's bound far below that of the start?"""
        scale = _batches_in_a_pass(prepared)
        passes, left = divmod(self.time + 1, math.ceil(scale))
        if scale == 1 or left or passes not in _CHECKED or not self._origin:
            return
        origin = {n: b for n, b in self._origin.items() if n in evaluator.beliefs}
        now, kept = evaluator.elbo(), {n: evaluator.beliefs[n] for n in origin}
        for name, belief in origin.items():
            evaluator.set(name, belief)
        first = evaluator.elbo()
        for name, belief in kept.items():
            evaluator.set(name, belief)
        if now < first - _FAR * max(abs(first), 1.0):
            found = f"after {passes} passes the bound of a minibatch is {now:.4g}, "
            found += f"at the start {first:.4g}"
            warnings.warn(
                message(
                    "CVI", found, "steps that come nearer to the optimum",
                    "scale the covariates to about one, place the site near the data by init_loc_fn, or "
                    "let the plate draw batches of its own (subsample_size) or larger ones",
                ),
                CVIWarning,
                stacklevel=6,
            )  # fmt: skip

    @property
    def rate(self) -> float:
        """rho_t of the stochastic rule."""
        return self._rate_after(self.time)

    def _calming(self, prepared: Prepared) -> float:
        """rho_t of the stochastic rule, begun after the passes that come near the optimum."""
        return self._rate_after(max(self.time - _EARLY * _batches_in_a_pass(prepared), 0.0))

    def _rate_after(self, steps: float) -> float:
        """(steps + delay)^-forget, at most one."""
        return max(steps + self.delay, 1.0) ** -self.forget

    def _least_rate(self, prepared: Prepared) -> float:
        """What steps do not fall below where targets drift."""
        return 1 / (self.memory * _batches_in_a_pass(prepared)) if self.drifts else 0.0

    def _remembered(
        self, prepared: Prepared, outer: list[Block], fitted: bool
    ) -> _Remembered | None:
        """The messages of batches and rows, with this batch begun, where they can be kept."""
        parts = [p for p in prepared.parts.values() if p.scale != 1]
        if self.minibatch != "stored" or self.is_stream or len(parts) != 1 or self.along:
            return None
        (part,) = parts
        if self._memory is None:
            self._memory = SiteMessages(part.full, fitted=fitted)
        if not self._memory.fits(sum(_message_size(b) for b in outer), part.size):
            return None
        name, weights = part.name, None
        own = self._batches[name].own(part.size) if name in self._batches else part.size
        counted = self._memory.begin(prepared.window[name], own)
        times = part.size / int(counted.sum())
        if times != 1:  # the elements that count stand for all of the batch
            weights = times * counted.to(torch.get_default_dtype())
        return _Remembered(self._memory, replace(part, scale=part.scale * times), weights)

    def _outside(
        self, evaluator: Evaluator, blocks: list[Block], seen: _Remembered | None, rate: float,
        further: dict[str, Gradient],
    ) -> None:  # fmt: skip
        """The steps of blocks outside of the subsampled plates, with gradients `further` to messages."""
        inside = evaluator
        if seen is not None and seen.weights is not None:
            inside = evaluator.with_weights(seen.part.name, seen.part.dim, seen.weights)
        for block in blocks:
            exact = evaluator.plan.is_exact(block)
            plate = None if seen is None else seen.part.name
            own, found = inside.message(block, plate), None
            message = own
            if seen is not None:
                outside = inside.message(block, outside=plate)
                message = [sum_gradients(a, b) for a, b in zip(own, outside, strict=True)]
                found = self._of_all_rows(inside, block, own, outside, seen)
            gradient, size = (message, rate) if found is None else found
            if block.name in further:
                pairs = zip(gradient, further[block.name], strict=True)
                gradient = [sum_gradients(a, b) for a, b in pairs]
            self._seen_in_part(inside, block, message, gradient, size, exact)
            if inside is not evaluator:
                evaluator.set(block.name, inside.beliefs[block.name])

    def _of_all_rows(
        self,
        evaluator: Evaluator,
        block: Block,
        own: Gradient,
        outside: Gradient,
        seen: _Remembered,
    ) -> tuple[Gradient, float] | None:
        """The gradient by messages of all rows, and the size of its step; None if they are not known."""
        memory, part = seen.memory, seen.part
        inside = [f for f in evaluator.factors(block) if part.name in f.plates]
        held = {b.name for b in evaluator.plan.blocks if b.held}
        alone = all(f.blocks - held == {block.name} for f in inside)
        leaves = evaluator.leaves[block.name]
        batch = tuple(or_zeros(g, like) / part.scale for g, like in zip(own, leaves, strict=True))
        rest = tuple(or_zeros(g, like) for g, like in zip(outside, leaves, strict=True))
        stored: Gradient = list(memory.put(block.name, evaluator.beliefs[block.name], batch, rest))
        if evaluator.plan.is_exact(block):
            return (stored, 1.0) if alone or not memory.is_mixed or memory.is_whole else None
        if alone and self._rows_stay(evaluator):
            by_row = memory.by_row(evaluator, block, inside, part, batch, rest)
            if by_row is not None:
                return ([*by_row], 1.0) if memory.has_rows(block.name) else None
        return (stored, _DAMPED) if memory.returns else None

    def _rows_stay(self, evaluator: Evaluator) -> bool:
        """Whether what is affine in a row's log density is the same whenever the row comes."""
        return not (evaluator.plan.learns or self.is_conditional or evaluator.temperature != 1)

    def _seen_in_part(
        self, evaluator: Evaluator, block: Block, message: Gradient, gradient: Gradient,
        rate: float, exact: bool,
    ) -> None:  # fmt: skip
        """A step on the message of a minibatch, or on a gradient by what is remembered of all of them.

        The test of a full step, E(q') - E(q) - <message, mean' - mean> >= (1 - 1/rho) KL(q' || q), where
        E is the minibatch's own: whether it bends too much for a step of this length has nothing to do
        with how far its message is from that of all data. It cannot tell what the messages of other
        batches, remembered from elsewhere, are worth here: where they make an improper target, this
        minibatch's serves, and curvatures of the wrong sign are turned.
        """
        name = block.name
        if exact:
            self._take(evaluator, block, gradient, rate)
            return
        old, before = evaluator.beliefs[name], evaluator.expected(block)
        slack = SLACK.get(old.tensors[0].dtype, 1e-6) * float(before.abs() + 1)
        known = self._rho.get(name, 1.0)
        rho = min(rate, float(known.min()) if isinstance(known, Tensor) else known)
        enlarged = False
        for _ in range(_HALVINGS):
            belief, step = old.moved(gradient, rho)
            if step.improper:
                gradient = old.turned(message)
                belief = old.moved(gradient, rho)[0]
            if belief.is_finite():
                evaluator.set(name, belief)
                far = evaluator.weight_of(block) * float(belief.kl(old))
                short = (1 - 1 / rho) * far - slack - evaluator.bend(block, message, before, old)
                if 0 < short <= NOTICED * float(before.abs() + 1) and not enlarged:
                    more, enlarged = evaluator.rounding(block), True
                    short -= max(more - slack, 0.0)
                    slack = max(slack, more)
                if short <= 0:
                    self._count(name, step)
                    self._rho[name] = 1.0 if rho == rate else min(1.0, 2 * rho)
                    return
            rho /= 2
        evaluator.set(name, old)

    # --- one block ---------------------------------------------------------------------------------

    def _exact(self, evaluator: Evaluator, block: Block) -> None:
        self._checked(evaluator, block, self._target(evaluator, block))

    def _target(self, evaluator: Evaluator, block: Block) -> Belief:
        """The optimum of a block given all others, whose messages are exact."""
        belief, step = evaluator.beliefs[block.name].moved(evaluator.message(block), 1.0)
        if step.improper:
            raise CVIError(
                f"block '{block.name}'",
                "its conditional posterior is improper (a likelihood and prior that do not "
                "determine it)",
                "a proper prior on every latent",
                "give the site a proper prior, or remove the mask on it",
            )
        return belief

    def _checked(self, evaluator: Evaluator, block: Block, belief: Belief) -> None:
        """Take an exact step, which cannot lower the bound: if it does, some factor is at fault."""
        name = block.name
        old = evaluator.beliefs[name]
        parts = evaluator.local_parts(block)
        before = float(parts.sum())
        evaluator.set(name, belief)
        after = float(evaluator.local(block))
        if not math.isfinite(after):
            return  # what is not finite, and why, is found at the end of the sweep
        size = float(parts.abs().sum()) + 1
        if before - after <= _ROUNDING * torch.finfo(old.tensors[0].dtype).eps * size:
            return
        if before - after <= _TERMS * evaluator.rounding(block):
            return
        values, factors = parts[1:].tolist(), evaluator.factors(block)
        faulty = factors[0].name
        worst = -math.inf
        slopes = [evaluator.slope(f, block, old) for f in factors]
        for f, v, slope in zip(factors, values, slopes, strict=True):
            wrong = abs(float(evaluator.factor(f).detach()) - v - slope)
            if wrong > worst:
                faulty, worst = f.name, wrong
        raise CVIError(
            f"factor '{faulty}'",
            f"the exact step of block '{name}' lowered the ELBO by {before - after:.3g}; of all its "
            "factors, this one is the furthest from what its message says",
            "a density that is affine in the block's sufficient statistics",
            "this is a defect of pyro_cvi or of a density rule: please report it with the model",
        )

    def _searched(self, evaluator: Evaluator, block: Block) -> None:
        """Mirror step with the acceptance test: see `searching`."""
        name = block.name
        found = searched(evaluator, block, self._rho.get(name, 1.0), self.accelerated)
        self._rho[name] = found.rho
        if found.step is not None:
            self._count(name, found.step)
        if found.target is not None:
            self._targets[name] = found.target

    def noisy(
        self, evaluator: Evaluator, block: Block, sampled: Gradient | None, rho: float
    ) -> None:
        """A step of size rho, untested; `sampled` is the part of the message from draws."""
        belief = evaluator.beliefs[block.name]
        gradient = evaluator.message(block)
        if sampled is not None:
            self._check_finite(block, sampled)
            sampled = [None if g is None else g / evaluator.temperature for g in sampled]
            gradient = [sum_gradients(a, b) for a, b in zip(gradient, sampled, strict=True)]
            if sampled[0] is not None:
                self._keep_control(block.name, belief, sampled, rho)
        self._take(evaluator, block, gradient, rho, noisy=sampled is not None)

    def _take(
        self,
        evaluator: Evaluator,
        block: Block,
        gradient: Gradient,
        rho: float,
        noisy: bool = False,
    ) -> None:
        old = evaluator.beliefs[block.name]
        moved: Belief
        if noisy and block.name in evaluator.plan.drawn:
            assert isinstance(old, GaussianBelief)
            moved, step = old.bent(gradient, rho, _TRUST)
        else:
            moved, step = old.moved(gradient, rho)
            moved = moved.trusted(old, _TRUST) if noisy else moved
        if moved.is_finite():
            evaluator.set(block.name, moved)
            self._count(block.name, step)

    def _check_finite(self, block: Block, sampled: Gradient) -> None:
        """A message that is not finite moves nothing; many in a row are an error."""
        if all(g is None or bool(g.isfinite().all()) for g in sampled):
            self._lost[block.name] = 0
            return
        self._lost[block.name] = self._lost.get(block.name, 0) + 1
        if self._lost[block.name] >= _MOST_LOST:
            raise CVIError(
                f"latent site '{block.sites[0]}'",
                f"the gradient of the log density was not finite in {_MOST_LOST} steps in a row",
                "a log density that is differentiable where the posterior lies",
                "look for sqrt, log or a division at zero in what the model computes from this "
                "site, also inside of torch.where",
            )

    def _keep_control(self, name: str, belief: Belief, sampled: Gradient, rho: float) -> None:
        new = tuple(or_zeros(g, like) for g, like in zip(sampled, belief.tensors, strict=True))
        if isinstance(belief, GaussianBelief):
            g_loc, g_cov = new
            new = (g_loc - 2 * (g_cov @ belief.loc.unsqueeze(-1)).squeeze(-1), g_cov)
        old = self.control.get(name)
        if old is not None:
            new = tuple(o + rho * (n - o) for o, n in zip(old, new, strict=True))
        self.control[name] = new

    def _count(self, name: str, step: Step) -> None:
        old = self.counts.get(name, Step())
        self.counts[name] = Step(
            old.improper + step.improper,
            old.shortened + step.shortened,
            old.retracted + step.retracted,
        )

    # --- sampled factors ---------------------------------------------------------------------------

    def _drawn(
        self, evaluator: Evaluator, prepared: Prepared, sampler: Sampler, noisy: frozenset[str],
        fresh: bool,
    ) -> None:  # fmt: skip
        """One decreasing step of all blocks that sampled factors touch; some are to be diagonal.

        One estimate and no test: a step costs what its draws do. Their value is that before the step.
        """
        self.settle_sampled(evaluator, sampler, noisy, fresh=fresh)
        estimate = sampler.estimate(evaluator, self.control, seed=self.next_seed())
        share = _batches_in_a_pass(prepared) / _SHARES
        slower = max(share, 1 / share)
        rho = min(_FIRST, _FIRST / share) * (1 + self.time / (_WARM * slower)) ** -0.7
        rho = max(rho, self._least_rate(prepared))
        for block in evaluator.plan.blocks:
            if block.name in noisy and block.moves and not block.placement:
                self.noisy(evaluator, block, estimate.messages.get(block.name), rho)
        self.sampled_value, self.error = estimate.value, estimate.error

    def _sampled(
        self, evaluator: Evaluator, prepared: Prepared, sampler: Sampler, noisy: frozenset[str],
        fresh: bool,
    ) -> None:  # fmt: skip
        """One damped step of all blocks that sampled factors touch, undone if it overshoots.

        With g_0 and g_1 the slopes of the ELBO along the step at its start and at its end, the latter
        from draws of its own, the rise is about (g_0 + g_1) / 2: g_1 < -g_0, by more than two standard
        errors, means that the step was too long; so does an ELBO that is clearly lower. The draws at
        the end serve the next step's messages.

        Both estimates are of one minibatch, and cannot tell how far its optimum is from that of all
        rows: steps that are as long as it likes would follow each minibatch for ever.
        """
        self.settle_sampled(evaluator, sampler, noisy, fresh=fresh)
        plan, old = evaluator.plan, dict(evaluator.beliefs)
        blocks = [b for b in plan.blocks if b.name in noisy and b.moves and not b.placement]
        if self.time == 0:
            _warn_if_few(blocks, sampler.count)
        before = self._known(evaluator)
        if before is None:
            before = sampler.estimate(evaluator, self.control, seed=self.next_seed(), groups=2)
        start = self._directions(evaluator, blocks, before)
        cloud = self.averaging
        rho = self._held or self._rate * (1 + self.time / _WARM) ** -0.7
        if plan.stochastic and not self.drifts:
            rho = min(rho, self._calming(prepared))
        stationary = False
        if not plan.stochastic and not plan.learns and self.temperature == 1:
            cloud.scalars = sum(b.size for b in blocks)
            if before is not self._observed:  # after an undone step it is the same estimate again
                self._stationary = cloud.observe(*_distance(old, start), rho)
            self._observed = before
            stationary = self._stationary
        controls, exact = dict(self.control), evaluator.elbo()
        for block in blocks:
            self.noisy(evaluator, block, before.messages.get(block.name), rho)
        after = sampler.estimate(evaluator, self.control, seed=self.next_seed(), groups=2)
        end = self._directions(evaluator, blocks, after)
        new = evaluator.beliefs
        first = sum(_slope(old, new, start, i) for i in (0, 1)) / 2
        halves = [_slope(old, new, end, i) for i in (0, 1)]
        last, error = sum(halves) / 2, abs(halves[0] - halves[1]) / 2
        fall = exact + before.value - evaluator.elbo() - after.value
        doubt = 3 * math.hypot(before.error, after.error)
        if not (last >= -abs(first) - 2 * error and fall <= doubt):
            for name in noisy:
                evaluator.set(name, old[name])
            self.control = controls
            self._rate = max(self._rate / 4, 1e-8)
            self._held = None if self._held is None else self._held / 4
            self._ahead = (plan, old, before)
            self.sampled_value, self.error = before.value, before.error
            return
        self._ahead = (plan, dict(new), after)
        self.sampled_value, self.error = after.value, after.error
        longer = last > 0.25 * first
        self._rate = min(1.0, self._rate * (1.5 if longer else 1.1 if last >= 0 else 0.9))
        if stationary:
            self._held = self._held or rho
            cloud.add({b.name: new[b.name] for b in blocks})
        else:
            self._held = None
            cloud.restart()

    def settle_sampled(
        self,
        evaluator: Evaluator,
        sampler: Sampler,
        noisy: frozenset[str],
        rounds: int = _LOCAL_ROUNDS,
        settled: float = _LOCALLY_SETTLED,
        *,
        fresh: bool = True,
    ) -> None:
        """Bring the sampled local blocks near their optimum given the others, by decreasing steps.

        Where some elements are `fresh`, their beliefs those of the start, all climb first.
        """
        local = [b for b in evaluator.plan.blocks if b.name in noisy and b.moves and b.placement]
        names = {b.name for b in local}
        if local and fresh:
            climb(evaluator, sampler, local, rounds=1, steps=_LOCAL_CLIMB)
        for i in range(rounds if self.shards.any(bool(local)) else 0):
            estimate = sampler.estimate(evaluator, self.control, seed=self.next_seed(), only=names)
            moved, rho = 0.0, 1 / (2 + 0.5 * i)
            for b in local:
                old = evaluator.beliefs[b.name]
                self.noisy(evaluator, b, estimate.messages[b.name], rho)
                moved = max(moved, float(old.kl(evaluator.beliefs[b.name])) / b.size)
            # A step of size rho goes rho of the way that is left. Seeds are drawn as often everywhere.
            if not self.shards.any(moved >= settled * rho**2):
                break
        for name in names:  # other elements the next time
            self.control.pop(name, None)

    def _directions(
        self, evaluator: Evaluator, blocks: list[Block], estimate: Estimate
    ) -> dict[str, list[tuple[Tensor, ...]]]:
        """For each block the full step, from each half of the draws."""
        found: dict[str, list[tuple[Tensor, ...]]] = {}
        for block in blocks:
            belief, rest = evaluator.beliefs[block.name], evaluator.message(block)
            found[block.name] = []
            for part in estimate.parts:
                own = [None if g is None else g / evaluator.temperature for g in part[block.name]]
                whole = [sum_gradients(a, b) for a, b in zip(rest, own, strict=True)]
                found[block.name].append(belief.direction(whole))
        return found

    def _known(self, evaluator: Evaluator) -> Estimate | None:
        """The estimate that the last step has left, if nothing has changed since."""
        if self._ahead is None:
            return None
        plan, beliefs, estimate = self._ahead
        self._ahead = None
        here = evaluator.plan
        if plan is None:  # from a fit that was saved
            same = all(is_of(evaluator.beliefs.get(n), tensors) for n, tensors in beliefs.items())
        else:
            same = plan is here and all(evaluator.beliefs[n] is b for n, b in beliefs.items())
        return estimate if same and not here.learns and not here.stochastic else None

    def average(self, evaluator: Evaluator, sampler: Sampler) -> bool:
        """Go over to the average of the stationary steps, unless its bound is clearly lower."""
        if self.averaging.count < 2:
            return False
        last = dict(evaluator.beliefs)
        mean = self.averaging.beliefs(last)
        sampler.count = max(sampler.count, _FINAL_DRAWS)
        before = sampler.estimate(evaluator, {}, gradient=False, seed=self.next_seed())
        exact = evaluator.elbo()
        for name, belief in mean.items():
            evaluator.set(name, belief)
        after = sampler.estimate(evaluator, {}, gradient=False, seed=self.next_seed())
        gain = evaluator.elbo() - exact + after.value - before.value
        if gain >= -3 * math.hypot(before.error, after.error):
            return True
        for name in mean:
            evaluator.set(name, last[name])
        return False

    # --- the start ---------------------------------------------------------------------------------

    def narrow(self, evaluator: Evaluator) -> None:
        """Narrow the start where a density has no expectation under its spread, or exp nearly overflows.

        Nearly: E exp(f) = exp(m + v/2) may be finite and beyond any use, as Newton's steps undo about
        one nat of it each. The bound itself says which of two starts is better.
        """
        if self.time > 0:
            return
        explosive = any(
            h.cause is Cause.EXPONENTIAL for f in evaluator.plan.factors for h in f.how.values()
        )
        plan = evaluator.plan
        inexact = {b.name for b in plan.blocks if not plan.is_exact(b)}
        elbo = evaluator.elbo()
        for _ in range(_NARROWINGS):
            finite = math.isfinite(elbo)
            if finite and not explosive:
                return
            kept = {b.name: evaluator.beliefs[b.name] for b in plan.blocks if not b.held}
            for name, b in kept.items():
                if isinstance(b, GaussianBelief):
                    evaluator.set(name, GaussianBelief(b.loc, 100 * b.precision))
                elif isinstance(b, StructuredBelief):
                    evaluator.set(name, b.narrowed(100))
                elif not finite and isinstance(b, FamilyBelief) and name in inexact:
                    narrow = concentrated(b.family, b.natural, 10.0)
                    if narrow is not None:
                        evaluator.set(name, FamilyBelief(b.family, narrow))
            narrower = evaluator.elbo()
            if finite and not narrower > elbo:
                for name, b in kept.items():
                    evaluator.set(name, b)
                return
            elbo = narrower


def is_of(belief: Belief | None, tensors: tuple[Tensor, ...]) -> bool:
    """Whether a belief has these tensors."""
    return belief is not None and all(
        a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(belief.tensors, tensors, strict=True)
    )


def _distance(
    beliefs: dict[str, Belief], directions: dict[str, list[tuple[Tensor, ...]]]
) -> tuple[float, float]:
    """d_1^T F d_2 of two halves of the draws, and the noise of both together."""
    residual = noise = 0.0
    for name, (one, two) in directions.items():
        apart = tuple((a - b) / 2 for a, b in zip(one, two, strict=True))
        residual += float(beliefs[name].inner(one, two).sum())
        noise += float(beliefs[name].inner(apart, apart).sum())
    return residual, noise


def _slope(
    old: dict[str, Belief],
    new: dict[str, Belief],
    directions: dict[str, list[tuple[Tensor, ...]]],
    half: int,
) -> float:
    """<gradient of the ELBO, change of the mean parameters>, in nats."""
    total = 0.0
    for name, parts in directions.items():
        if new[name] is not old[name]:
            changes = zip(parts[half], new[name].leaves(), old[name].leaves(), strict=True)
            total += sum(float((d * (b - a).detach()).sum()) for d, b, a in changes)
    return total


def _warn_if_few(blocks: Sequence[Block], count: int) -> None:
    """Of a wide Gaussian that is sampled, few draws leave the curvature to noise: fits may diverge."""
    for b in blocks:
        width = 0 if b.layout is None else b.layout.width
        if width > _WIDE and count < 2 * width:
            warnings.warn(
                message(
                    f"latent site '{b.sites[0]}'",
                    f"{width} scalars with one covariance, of which {count} draws a step tell little",
                    f"{2 * width} draws or more, or scalars that are independent",
                    f"CVI(model, guide, num_samples={4 * width}), or infer={{'posterior': 'diagonal'}} "
                    "at the site, as by pyro.poutine.infer_config",
                ),
                CVIWarning,
                stacklevel=8,
            )


def _shake(evaluator: Evaluator) -> None:
    """Disturb the discrete blocks a little: hot, all components are one, and must be able to part."""
    for block in evaluator.plan.blocks:
        belief = evaluator.beliefs[block.name]
        if block.is_discrete and isinstance(belief, FamilyBelief):
            states, *others = belief.natural
            noise = torch.randn_like(states)
            if not evaluator.is_own(block):
                (noise,) = evaluator.shards.from_first([noise])
            moved = states.log_softmax(-1) + _SHAKE * noise
            evaluator.set(block.name, FamilyBelief(belief.family, (moved, *others)))


def _is_symmetric(plan: Plan) -> bool:
    """Whether a local discrete site could stand for components that are alike at the start."""
    return any(b.placement and b.is_discrete for b in plan.blocks)


def _batches_in_a_pass(prepared: Prepared) -> float:
    """How many minibatches hold as many elements as there are."""
    return max((p.scale for p in prepared.parts.values()), default=1.0)


def _elements(block: Block) -> int:
    assert block.placement is not None
    return math.prod(max(p.size, 1) for p in block.placement.parts)


def _message_size(block: Block) -> int:
    """Scalars of one message to a block."""
    if block.layout is not None:
        return block.layout.count * block.layout.width * (block.layout.width + 1)
    return len(block.family.statistics) * block.size


def shift_of(old: dict[str, Belief], new: dict[str, Belief]) -> float:
    """How far a step has moved the scalar that it moved most, in standard deviations."""
    return max((float(b.shift(new[n])) for n, b in old.items() if new[n] is not b), default=0.0)
