"""CVI: step, run and evaluate_loss. The loop and nothing else.

    natural_b  <-  (1 - rho) natural_b + rho * sum_factors grad_mean E_q[log p]        for every block b

How long the step of each block is, and whether it is taken, is the matter of `sweep`.

Reference: M. E. Khan, W. Lin (2017), Conjugate-Computation Variational Inference, arXiv 1703.04265.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_cvi.acceleration import Mixing
from pyro_cvi.ascent import ABSURD
from pyro_cvi.distributed import Shards
from pyro_cvi.errors import CVIError, message
from pyro_cvi.explain import Report, make_report
from pyro_cvi.graph.evaluator import Evaluator, is_own
from pyro_cvi.graph.particles import Particles
from pyro_cvi.graph.pointed import at_points, levels, points_of, refine
from pyro_cvi.graph.prepared import Prepared, is_stream, prepare
from pyro_cvi.graph.sampling import Sampler, Sampling, noise_by_site
from pyro_cvi.graph.symbolic import Call
from pyro_cvi.graph.validation import check_model
from pyro_cvi.graph.windows import Window
from pyro_cvi.guide import AutoCVI
from pyro_cvi.hybrid import Draw, HybridGuide, Others, of_elements, split
from pyro_cvi.joint import begun, candidates
from pyro_cvi.linalg import all_finite, or_zeros, sum_gradients
from pyro_cvi.modes import public_call
from pyro_cvi.prediction import (
    SAMPLED_ROUNDS,
    SAMPLED_SETTLED,
    forecast,
    local_posteriors,
    log_predictive,
)
from pyro_cvi.running import MORE, USUAL, Best, RunResult, apart, complaint, still_gains, warn_of
from pyro_cvi.saddles import leave_saddle
from pyro_cvi.saving import write
from pyro_cvi.start import TOPICS, has_topics
from pyro_cvi.stopping import Progress
from pyro_cvi.sweep import Sweeper, is_of, shift_of
from pyro_cvi.updates import Belief

__all__ = ["CVI", "RunResult"]

_FORGET = 0.1
"""Weight of the last bound in the baseline of other guides' score functions."""
_ROUNDING = 8.0
"""Units of rounding of the bound's summands below which a gain is none."""
_WORTH = 0.05
"""Nats by which the bound of a joint Gaussian has to be higher than that of separate blocks."""
_TRIED, _TIRED = 10, 80
"""Steps after which a joint one that seems to be going to lose is given up, and any that is behind."""
_HAND_OVER = 40
"""Steps after which blocks that have not converged try a joint one first."""
_ROUGH = 0.2
"""Nats left at which fixed points are compared with others: with too few an optimum is worth little."""
_STILL = 0.01
"""Nats that a single step gains, below which it is asked if there is more to gain elsewhere."""
_ESCAPES = 8
"""How often a run that has converged goes on, off a saddle or with more points."""
_LOSSES = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO, TraceGraph_ELBO)


class _Options(NamedTuple):
    """What `run` was asked for; after `steps`, up to `most` where a fit may go on."""

    steps: int
    most: int
    tol: float
    bar: Any
    annealing: tuple[float, int] | None
    joins: bool = True
    refines: bool = True
    rival: float = math.inf

    def has_lost(self, loss: float, steps: int, progress: Progress) -> bool:
        """Whether this run will not end below its rival by what a joint Gaussian has to be worth."""
        wanted = self.rival - _WORTH
        if steps < _TRIED or loss <= wanted:
            return False
        return steps >= _TIRED or loss - progress.left > wanted

    def show(self, loss: float, progress: Progress) -> None:
        """Let the bar say how it goes."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {progress.left:.1e} nats left")
            self.bar.update()


class _Given(NamedTuple):
    """The model given a draw of the other guides, if there are any, and its analysis."""

    model: Callable[..., Any]
    draw: Draw | None
    prepared: Prepared


class CVI:
    """Conjugate-computation variational inference, with the call shape of `pyro.infer.SVI`.

    Arguments:
        model: a Pyro model.
        guide: an `AutoCVI`; or an `AutoGuideList` (best a `HybridGuide`) with one for some of the
            sites, beside guides of any kind for the others: see `pyro_cvi.hybrid`.
        optim: a `PyroOptim`, for the `pyro.param` values of the model and of other guides; CVI's
            posterior needs none.
        loss: accepted for the sake of swapping; one of Trace_ELBO, TraceMeanField_ELBO,
            TraceEnum_ELBO, TraceGraph_ELBO (they are the same objective). As with SVI,
            `cvi.loss(cvi.model, cvi.guide, *args)` is its estimate by draws. Its `num_particles` is the
            number of draws of other guides a step: bound, gradients and messages are means over them, at
            the price of so many steps.
        minibatch: "stored" keeps the messages of all rows of a subsampled plate, as far as they fit into
            memory, and takes full steps with them: by row where a row sees one Gaussian predictor, else
            by batch, as long as the batches of a pass are those of the pass before. "stochastic" is the
            paper's rule (SVI on a conjugate model), which keeps nothing and takes steps of size rho_t.
            It also serves the first pass of messages by quadrature, other batches that are mixed anew,
            and streams: rows that do not change with the indices their plate draws.
        delay, forget: rho_t = (t + delay)^-forget at step t = 0, 1, ... of the stochastic rule.
        memory: passes over the data that this rule remembers at most where other guides or the model
            learn parameters, and its targets move with them; math.inf for no limit.
        num_samples: draws a step, for factors that neither algebra nor quadrature can average; at
            least 4 (2 where sites are to have a diagonal posterior), and an even number. A Gaussian
            block gets four for each of its scalars up to 32 of them, and two up to 64.
        antithetic: draws come in pairs that mirror each other.
        fisher: how gradients in the natural parameters of Gamma, inverse Gamma, Beta and Dirichlet sites
            become gradients in mean parameters: by the "analytic" Fisher matrix, or by one that is
            "sampled" from the same draws, as in the paper.
        seed: of the draws of this fit, which then neither use nor disturb torch's random state; None
            takes that state.
        shards: plates whose elements are spread over the processes of `torch.distributed`: each has
            some of them, and gives the plate the size of its own. Sums of messages, bounds and gradients
            go over all processes, each of which calls `step` or `run` as often.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoCVI | AutoGuideList,
        optim: PyroOptim | None = None,
        loss: ELBO | None = None,
        *,
        minibatch: str = "stored",
        delay: float = 1.0,
        forget: float = 0.7,
        memory: float = 10.0,
        num_samples: int = 16,
        antithetic: bool = True,
        fisher: str = "analytic",
        seed: int | None = None,
        shards: Sequence[str] = (),
    ) -> None:
        check_model(model)
        self._own, beside = split(guide)
        self._others = None if beside is None else Others(beside, self._own)
        if isinstance(beside, HybridGuide):
            beside.take(model)
        if optim is not None and not isinstance(optim, PyroOptim):
            raise CVIError(
                "CVI",
                f"optim is a {type(optim).__name__}",
                "a pyro.optim.PyroOptim or None",
                'pyro.optim.Adam({"lr": 0.01}); it is for pyro.param only',
            )
        if loss is not None and type(loss) not in _LOSSES:
            names = ", ".join(c.__name__ for c in _LOSSES)
            raise CVIError(
                "CVI",
                f"the loss is {type(loss).__name__}",
                f"the ELBO ({names}) or None",
                "leave loss out; CVI maximises the ELBO and no other bound",
            )
        if minibatch not in ("stored", "stochastic"):
            raise CVIError(f"minibatch is {minibatch!r}; expected 'stored' or 'stochastic'")
        if not (delay >= 0 and 0.5 < forget <= 1):
            raise CVIError(
                f"delay is {delay!r} and forget is {forget!r}; expected delay >= 0 and forget in "
                "(0.5, 1], for which the steps of the stochastic rule converge"
            )
        if not memory >= 1:
            raise CVIError(f"memory is {memory!r}; expected a number of passes, at least one")
        if not _is_count(num_samples, 2):
            raise CVIError(f"num_samples is {num_samples!r}; expected an integer of at least 2")
        if fisher not in ("analytic", "sampled"):
            raise CVIError(f"fisher is {fisher!r}; expected 'analytic' or 'sampled'")
        if not isinstance(antithetic, bool):
            raise CVIError(f"antithetic is {antithetic!r}; expected True or False")
        if seed is not None and not (_is_count(seed, 0) and seed < 2**63):
            raise CVIError(f"seed is {seed!r}; expected None or an integer from 0 to 2**63 - 1")
        self.model, self.guide, self.optim = model, guide, optim
        self._baseline: float | None = None
        self._pending: dict[str, Tensor] = {}
        self._resumes = False
        self._last, self._has_looked = math.inf, False
        self._points: dict[str, tuple[int, int]] = {}
        self.loss: Callable[..., float] = (Trace_ELBO() if loss is None else loss).loss
        drawn = loss is not None and self._others is not None
        self._particles: int = loss.num_particles if loss is not None and drawn else 1
        self._evaluator: tuple[Prepared, Evaluator] | None = None
        self.sampling = Sampling(num_samples, antithetic, fisher)
        self.shards = Shards.of(shards)
        self._sweeper = Sweeper(minibatch, delay, forget, seed, memory, self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but values that are computed again."""
        return {**self.__dict__, "_evaluator": None}

    # --- public ------------------------------------------------------------------------------------

    @public_call
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One sweep over the blocks; the negative ELBO of the state it leaves, summed over data.

        Where something is sampled or subsampled the return value is an estimate. After a sweep that
        gains next to nothing a saddle is left, and fixed points are doubled, as at the end of a `run`.
        An error leaves the posterior as it was.
        """
        loss = self._guarded_step(args, kwargs, unchanged=False, temperature=1.0)
        return self._looked_around(args, kwargs, loss)

    def _looked_around(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: float) -> float:
        """The loss after single steps, of which one that stands still is asked once if it is the end."""
        gain, self._last = self._last - loss, loss
        if not abs(gain) <= _STILL:
            self._has_looked = False
        elif not self._has_looked and self._own.plan.is_deterministic and self._others is None:
            self._has_looked = True
            with suppress(CVIError):  # somewhere else, which nobody has asked for
                if self._goes_on(args, kwargs, Progress(_STILL), RunResult([loss], errors=[0.0])):
                    assert self._own.prepared is not None
                    self._last = -self._evaluator_for(self._own.prepared).elbo()
                    self._has_looked = False
        return self._last

    def _guarded_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unchanged: bool,
        temperature: float,
        progress: Progress | None = None,
    ) -> float:
        """A step, of which `progress` takes note."""
        with torch.enable_grad(), self._own.undone_on_error(), self._own_randomness():
            self._sweeper.temperature = temperature
            return self._step(args, kwargs, unchanged, progress)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """With a seed, torch's random state is another one inside, and the same as before after it."""
        if self._sweeper.seed is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(self._sweeper.next_seed())
            yield

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unchanged: bool,
        progress: Progress | None,
    ) -> float:
        sweeper = self._sweeper
        fitted = self._own.is_fitted
        chosen = sweeper.chosen(self._own.prepared)
        if self._resumes:
            self._resume(args, kwargs, chosen)
        elif self.shards.plates and sweeper.time == 0:
            self._share_parameters(args, kwargs, chosen)
        given = self._prepared(args, kwargs, chosen, unchanged=unchanged)
        model, draw, prepared = given[0]
        self._check_params(prepared)
        self._check_particles(prepared)
        if self.shards.plates and sweeper.time == 0:
            self._check_shards(prepared)
        if sweeper.time == 0 and prepared.plan.stochastic and sweeper.minibatch == "stored":
            sweeper.is_stream = bool(self.shards.plates) or is_stream(prepared, model, args, kwargs)
        sweeper.beside = frozenset() if draw is None else draw.plates
        sweeper.is_conditional = draw is not None
        sweeper.drifts = prepared.plan.learns and not (draw is not None and draw.shared)
        draws = [g.draw for g in given if g.draw is not None]
        sweeper.along = None
        if any(d.along for d in draws):
            sweeper.along = partial(self._along, draws)
        before, control = self._own.beliefs(), dict(sweeper.control)
        try:
            evaluator = self._evaluator_of(given)
            if self.shards.plates and sweeper.time == 0:
                self._share_start(evaluator)
            sweeper.narrow(evaluator)
            sampler = partial(self._sampler, prepared, args, kwargs, model)
            sweeper.located = self._own.located
            unseen = self._own.has_unseen()
            sweeper.sweep(evaluator, prepared, sampler, fitted=fitted, unseen=unseen)
            elbos = self._elbos(evaluator, given, sweeper.sampled_value)
            elbo = sum(elbos) / len(elbos)
            finite = all(
                evaluator.beliefs[b.name].is_finite()
                for b in prepared.plan.blocks
                if not b.is_discrete  # states that are not finite have no finite ELBO
            )
            if not math.isfinite(elbo) or not finite:
                raise CVIError(self._not_finite(evaluator, elbo))
            if prepared.plan.learns:
                self._learn(evaluator, prepared, sampler, [g.draw for g in given], elbos)
        except BaseException:
            self._evaluator = None
            sweeper.undo(control)
            raise
        for block in prepared.plan.blocks:
            new = evaluator.beliefs[block.name]
            if block.placement is not None or new is not before[block.name]:
                self._own.set_belief(block, new)
        if progress is not None:
            self._note(progress, -elbo, evaluator, before)
        sweeper.done(prepared)
        return -elbo

    def _note(
        self, progress: Progress, loss: float, evaluator: Evaluator, before: dict[str, Belief]
    ) -> None:
        """What a step says of the end of the run; how far it moved is measured where that counts."""
        progress.add(loss, plain=not self._sweeper.is_mixture)
        progress.floor = _ROUNDING * evaluator.rounding_of_bound()
        assert self._own.prepared is not None
        progress.least = -ABSURD * self.shards.number(self._own.prepared.observed_cells)
        if progress.is_near:
            now, places = dict(evaluator.beliefs), progress.places
            progress.moved = self.shards.largest(shift_of(before, now))
            progress.walked = self.shards.largest(shift_of(places[0] if places else before, now))
            places.append(now)

    @public_call
    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO now; changes nothing.

        Where nothing is sampled or subsampled, Pyro's random state is left as it was too. Of a minibatch
        with local latents it is the loss with these at their optimum.
        """
        evaluator, random = self._evaluator, torch.get_rng_state()
        try:
            with torch.enable_grad(), self._own.undone_on_error(always=True):
                given = self._prepared(args, kwargs, {}, fitting=False)
                model, _, prepared = given[0]
                self._check_particles(prepared)
                found = self._evaluator_of(given)
                if prepared.has_local:
                    noisy = prepared.plan.noisy()
                    self._sweeper.settle(found, noisy)
                    if noisy:
                        other = Sweeper(
                            "stochastic", 1.0, 0.7, self._sweeper.seed, shards=self.shards
                        )
                        sampler = self._sampler(prepared, args, kwargs, model)
                        other.settle_sampled(
                            found, sampler, noisy, SAMPLED_ROUNDS, SAMPLED_SETTLED,
                            fresh=self._own.has_unseen(),
                        )  # fmt: skip
                sampled = self._sampled_value(found, model, prepared, args, kwargs)
                elbos = self._elbos(found, given, sampled)
                loss = -sum(elbos) / len(elbos)
            if not prepared.plan.stochastic and not prepared.plan.sampled_sites():
                torch.set_rng_state(random)
            return loss
        finally:
            self._evaluator = evaluator

    @public_call
    def run(
        self,
        *args: Any,
        num_steps: int | None = None,
        tol: float = 0.01,
        progress: bool = False,
        num_restarts: int = 1,
        annealing: tuple[float, int] | None = None,
        **kwargs: Any,
    ) -> RunResult:
        """Step until less than `tol` nats are left to gain, and no mean has `tol` of its sd to go.

        What is left follows from the last gains and their contraction (`pyro_cvi.stopping`), with a
        floor at the rounding of the bound. A run that ends before that warns, and says what was left.

        A run with samples ends in the average of its last steps, from where they came no nearer to the
        optimum; with `tol` above zero it stops when that average, or the steps themselves, are within
        1e-3 nats of the optimum for every scalar that is sampled. A run with subsampling takes all
        `num_steps`.

        Arguments:
            num_steps: at most so many steps. If it is not given, 100, or up to 1,000 for as long as
                a fit gains (not with subsampling, nor where parameters are learnt).
            num_restarts: fits from this many starts (the first from where the guide is) and keeps the
                best, by its last loss.
            annealing: (temperature, steps): the first steps maximise E[log p] + T H[q], with T falling
                geometrically from the temperature to 1, and with a little noise in discrete sites.
                If it is not given, topics that start at random take (1.4, 80), or half of `num_steps`;
                (1, 1) switches that off. Mixtures gain little by it.

        A KeyboardInterrupt leaves the posterior of the last whole step; its `result` has the losses.
        """
        steps = USUAL if num_steps is None else num_steps
        self._check_run(steps, tol, num_restarts, annealing)
        start = time.perf_counter()
        bar = _progress_bar(steps * num_restarts) if progress else None
        best: tuple[RunResult, Any, Sweeper] | None = None
        finals = []
        options = _Options(steps, MORE if num_steps is None else steps, tol, bar, annealing)
        try:
            for i in range(num_restarts):
                if i > 0 and steps > 0:
                    self._restart()
                result = self._run_once(args, kwargs, options)
                finals.append(self._final_loss(result.losses))
                if num_restarts == 1:
                    best = (result, None, self._sweeper)
                elif best is None or finals[-1] < min(finals[:-1]):
                    best = (result, self._own.snapshot(), self._sweeper)
        finally:  # an interrupted restart leaves the best start so far
            if best is not None and best[1] is not None:
                self._own.restore(best[1])
                self._sweeper, self._evaluator = best[2], None
            self._sweeper.accelerated = self._sweeper.is_mixture = False
            self._sweeper.mixing = Mixing.NEVER
        assert best is not None
        result = self._joined(args, kwargs, options, best[0])
        result.restarts = finals
        if bar is not None:
            bar.total = bar.n
            bar.refresh()
            bar.close()
        result.seconds = time.perf_counter() - start
        if result.warning:
            warn_of(result.warning)
        elif (found := apart(finals)) is not None:
            warn_of(found, restarts=True)
        return result

    def _joined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options, result: RunResult
    ) -> RunResult:
        """The run that goes on with one Gaussian of the sites that meet, if its bound is higher."""
        own, sweeper = self._own, self._sweeper
        if not result.losses or not self._may_join(options):
            return result
        sites = candidates(own.plan, min(own.max_joint_dim, own.max_dense_dim))
        kept = own.kept()
        prepared = prepare(
            self.model, args, kwargs, own.max_dense_dim, joint=sites | own.plan.joint,
            max_joint_dim=own.max_joint_dim,
        )  # fmt: skip
        (block, *more) = (b for b in prepared.plan.blocks if sites & set(b.sites))
        if more or prepared.plan.sampled_sites():
            return result
        beliefs, before = own.beliefs(), own.plan
        own.rejoin(prepared)
        own.set_belief(block, begun(block, prepared.plan, before, beliefs))
        for b in prepared.plan.blocks:
            if b is not block:
                own.set_belief(b, beliefs[b.name])
        self._sweeper, self._evaluator = sweeper.fresh(), None
        self._sweeper.time = sweeper.time
        better, later = False, options._replace(joins=False)
        trial = later._replace(
            annealing=None, refines=result.converged, rival=result.losses[-1]
        )  # a bound on few points is compared with one on as few
        try:
            with suppress(CVIError):
                joint = self._run_once(args, kwargs, trial)
                better = result.losses[-1] - joint.losses[-1] - joint.errors[-1] > _WORTH
        finally:
            if not better:
                own.back_to(kept)
                self._sweeper, self._evaluator = sweeper, None
        found = result.followed_by(joint) if better else result
        if result.converged:
            return found
        return found.followed_by(self._run_once(args, kwargs, later))

    def _may_join(self, options: _Options) -> bool:
        """Whether a joint Gaussian of some sites is to be tried."""
        alone = self._others is None and not self.shards.plates
        if not (alone and options.joins and options.tol > 0):
            return False
        own = self._own
        return bool(candidates(own.plan, min(own.max_joint_dim, own.max_dense_dim)))

    def _check_run(
        self, num_steps: Any, tol: float, num_restarts: Any, annealing: tuple[float, int] | None
    ) -> None:
        if not _is_count(num_steps, 0):
            raise CVIError(f"num_steps is {num_steps!r}; expected an integer, zero or more")
        if not _is_count(num_restarts, 1):
            raise CVIError(
                f"num_restarts is {num_restarts!r}; expected an integer, at least one start"
            )
        if math.isnan(tol):
            raise CVIError("tol is nan; expected a number (negative: take all steps)")
        if annealing is not None and not _is_schedule(annealing, num_steps):
            raise CVIError(
                f"annealing is {annealing!r}; expected (temperature, steps) with a temperature of at "
                f"least 1 and fewer steps than the {num_steps} of the run"
            )

    def _run_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
    ) -> RunResult:
        result = RunResult()
        try:
            return self._run_into(result, args, kwargs, options)
        except KeyboardInterrupt as stop:
            stop.result = result  # type: ignore[attr-defined] # what was done so far
            raise

    def _run_into(
        self, result: RunResult, args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
    ) -> RunResult:
        progress, best = Progress(options.tol), Best()
        hot, cooling = options.annealing or (1.0, 0)
        anneals = options.annealing is None and not self._own.is_fitted
        start = time.perf_counter()
        changes, i, escapes, looked = False, 0, 0, False
        while i < options.steps or (i < options.most and self._may_go_on(progress, result)):
            if i == _HAND_OVER and self._may_join(options):
                break  # blocks that creep against each other: a joint one may not
            temperature = hot ** (1 - i / cooling) if i < cooling else 1.0
            # The model is compared with its plan in steps 0, 1, 4, 16, ... and in the last one; if that
            # finds a change (a model of random data), in every step.
            unchanged = not _is_power_of_four(i) and 0 < i < options.steps - 1 and not changes
            plan = self._own.prepared
            free = i < options.most - 1 and not progress.asks_for_plain
            self._sweeper.accelerated = free
            self._sweeper.mixing = Mixing.WHERE_IT_CREEPS if free else Mixing.REMEMBERED
            if progress.asks_for_mixture:
                self._sweeper.mixing = Mixing.NOW
            try:
                loss = self._guarded_step(args, kwargs, unchanged, temperature, progress)
            except CVIError:
                if i < options.steps:
                    raise
                break  # beyond the usual number of steps: what there is stays
            changes = changes or (i > 0 and plan is not self._own.prepared)
            i = result.add(loss, self._sweeper.error, time.perf_counter() - start)
            if anneals and i == 1 and self._are_topics:
                hot, cooling = TOPICS[0], min(TOPICS[1], options.most // 2)
            options.show(loss, progress)
            if self._is_sampled:
                best.offer(result.losses, self._own.state)
            if temperature > 1:
                progress.restart()
            elif self._is_converged(progress):
                more = options.refines and escapes < _ESCAPES
                if more and self._goes_on(args, kwargs, progress, result):
                    escapes += 1
                    continue
                result.converged = self._is_stationary(progress)
                result.reason = f"less than {progress.allowed:.2g} nats are left to gain"
                break
            elif options.has_lost(loss, i, progress):
                break
            elif not looked and options.refines and progress.left <= _ROUGH:
                looked = not (
                    levels(self._own.plan) and self._goes_on(args, kwargs, progress, result)
                )
            averaging = self._sweeper.averaging
            if options.tol > 0 and (averaging.is_enough or averaging.is_near):
                result.converged, result.reason = True, averaging.verdict
                break
        self._end(args, kwargs, result, progress, best)
        return result

    def _is_stationary(self, progress: Progress) -> bool:
        """Whether there is no direction to go, where a small gain alone does not say so.

        A bound that is absurd, or that no step changes, is a maximum only if a full step is short.
        """
        prepared = self._own.prepared
        if prepared is None or not (progress.is_absurd or progress.moved == 0):
            return True
        with torch.enable_grad():
            distance = self._evaluator_for(prepared).distance_left()
        return self.shards.largest(distance) <= max(1.0, progress.floor)

    def _end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: RunResult, progress: Progress,
        best: Best,
    ) -> None:  # fmt: skip
        """Take the average of sampled steps, or the best state; say what was left."""
        self._average(args, kwargs)
        prepared = self._own.prepared
        if prepared is None:
            return
        if best.is_better(result.losses, self._sweeper.error):
            assert best.state is not None
            self._own.restore(best.state)
            self._evaluator, result.converged = None, False
            result.losses[-1] = best.loss
        result.left = progress.left
        result.warning = complaint(result, prepared, self._sweeper.counts, progress)
        if not result.converged:
            result.reason = result.warning or "num_steps reached"

    @property
    def _are_topics(self) -> bool:
        plan = self._own.plan
        return not plan.stochastic and has_topics(plan, self._own.located)

    @property
    def _is_sampled(self) -> bool:
        plan = self._own.plan
        return bool(plan.sampled_sites()) and not plan.stochastic and not plan.learns

    def _may_go_on(self, progress: Progress, result: RunResult) -> bool:
        """Whether a fit still gains after the usual number of steps."""
        prepared = self._own.prepared
        if prepared is None or not progress.tol > 0:
            return False
        return prepared.plan.is_deterministic or (self._is_sampled and still_gains(result.losses))

    def _goes_on(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress, result: RunResult
    ) -> bool:
        """Whether there is more to gain in spite of the stop: off a saddle, or with more points."""
        prepared = self._own.prepared
        assert prepared is not None
        with torch.enable_grad(), self._own.undone_on_error(), self._own_randomness():
            evaluator = self._evaluator_for(prepared)
            # A saddle shows at the first points: with more of them its steps take long.
            is_new = not any(levels(prepared.plan))
            found = leave_saddle(evaluator, self._sweeper, progress.allowed) if is_new else []
            for name in found:
                self._own.set_belief(prepared.plan.block_named(name), evaluator.beliefs[name])
        if found:
            progress.restart()
            return True
        return self._refined(progress, result)

    def _refined(self, progress: Progress, result: RunResult) -> bool:
        """Whether there are more fixed points now, for other points do not support the bound."""
        prepared = self._own.prepared
        assert prepared is not None
        with torch.enable_grad(), self._own.undone_on_error(), self._own_randomness():
            refined = refine(self._evaluator_for(prepared))
        if refined is None:
            return False
        result.note_check(refined.loss, refined.error)
        if refined.plan is None:
            return False
        self._own.replan(refined.plan)
        self._evaluator = None
        progress.restart()
        return True

    def _average(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the average of the stationary steps in the place of the last one."""
        prepared, averaging = self._own.prepared, self._sweeper.averaging
        if prepared is None or averaging.count < 2:
            return
        with torch.enable_grad(), self._own.undone_on_error():
            evaluator = self._evaluator_for(prepared)
            sampler = self._sampler(prepared, args, kwargs)
            if self._sweeper.average(evaluator, sampler):
                for block in prepared.plan.blocks:
                    self._own.set_belief(block, evaluator.beliefs[block.name])
        averaging.restart()

    def _restart(self) -> None:
        """Another start, with nothing remembered."""
        old = self._sweeper
        with self._own_randomness():
            self._own.reset()
        self._sweeper = old.fresh()
        self._evaluator = None

    @public_call
    def explain(self) -> Report:
        """What was done in each factor for each site, and why; print it."""
        return make_report(self._own.plan, self._sweeper.counts)  # raises before the first step

    @public_call
    def message_noise(self, *args: Any, num_groups: int = 8, **kwargs: Any) -> dict[str, float]:
        """E[(m' - m)^T F (m' - m)] in nats, m' the sampled part of a message to a site and m its mean.

        In this metric 0.01 for a scalar moves it by a tenth of a standard deviation at full step size.
        Estimated from the draws of so many steps, which change nothing; only sampled sites are in the
        result.
        """
        if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 2:
            raise CVIError(f"num_groups is {num_groups!r}; expected an integer of at least 2")
        with torch.enable_grad(), self._own.undone_on_error(always=True):
            model, _, prepared = self._prepared(args, kwargs, {}, fitting=False)[0]
            sampler = self._sampler(prepared, args, kwargs, model)
            evaluator = Evaluator(prepared.plan, self._own.beliefs())
            seed = self._sweeper.seed
            messages = [
                sampler.estimate(
                    evaluator,
                    self._sweeper.control,
                    groups=2,
                    seed=None if seed is None else seed + i,
                ).messages
                for i in range(num_groups)
            ]
            return noise_by_site(evaluator, messages, prepared.plan.sampled_sites())

    # --- saving ------------------------------------------------------------------------------------

    @public_call
    def save(self, file: Any) -> None:
        """Write what a fit needs to go on as if it had not been interrupted, to a file or path.

        What interrupts it leaves the file of that path as it was.

        The posterior, step sizes and stored messages, the optimiser's state, the parameters that it
        moves and torch's random state. Not the model, nor networks as such: save these as ever.
        """
        state = {
            "posterior": self._own.saved(),
            "sweeper": self._sweeper,
            "baseline": self._baseline,
            "looked": (self._last, self._has_looked),
            "points": {} if self._own.prepared is None else points_of(self._own.plan),
            "optimiser": None if self.optim is None else self.optim.get_state(),
            "parameters": {
                n: p.detach().clone()
                for n, p in (self._own.prepared.parameters if self._own.prepared else {}).items()
            },
            "random": torch.get_rng_state(),
        }
        write(state, file)

    @public_call
    def load(self, file: Any) -> None:
        """Take over the state of `save`, in a CVI of the same model, guide and options.

        It needs no data: the guide can be asked at once. Parameters get their values at the next step.
        If that sees the same data, the fit goes on as it would have, to the last bit.
        """
        state = torch.load(file, weights_only=False)
        if not isinstance(state, dict) or "sweeper" not in state:
            raise CVIError(
                "CVI.load",
                "a file that CVI.save has not written",
                "the state of a CVI",
                "guide.load_state_dict(torch.load(file)) for the state_dict of a guide",
            )
        self._own.resume(state["posterior"])
        self._sweeper, self._baseline = state["sweeper"], state["baseline"]
        self._last, self._has_looked = state["looked"]
        self._points = state["points"]
        self._sweeper.shards = self.shards
        if self.optim is not None and state["optimiser"] is not None:
            self.optim.set_state(state["optimiser"])
        self._pending = state["parameters"]
        self._evaluator, self._resumes = None, True
        torch.set_rng_state(state["random"])

    def _resume(self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window) -> None:
        """Find the parameters of a fit that was loaded, and the plan; draw no random numbers for it."""
        random, self._resumes = torch.get_rng_state(), False
        model, leaves, _ = self._parameters(args, kwargs, chosen)
        self._restore_parameters(leaves)
        known = self._own.prepared
        if known is not None and not known.plan.stochastic and not known.plan.learns:
            found = self._own.prepare(model, args, kwargs, chosen, spread=self.shards.plates)
            self._own.replan(at_points(found.plan, self._points))
        torch.set_rng_state(random)

    def _parameters(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window
    ) -> tuple[Callable[..., Any], dict[str, Tensor], frozenset[str]]:
        """The model given a draw of the other guides; parameters of all; those of local elements."""
        model, draw = self._given(args, kwargs, chosen)
        leaves = dict({} if draw is None else draw.parameters)
        with poutine.block(), poutine.trace(param_only=True) as handler:
            model(*args, **kwargs)
        for name, site in handler.trace.nodes.items():
            if site["type"] == "param":
                leaves[name] = site["value"].unconstrained()
        local = of_elements(handler.trace, self.shards)
        return model, leaves, local if draw is None else local | draw.local

    def _share_parameters(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window
    ) -> None:
        """All processes begin with the parameters of the first one; no random number is used up."""
        random = torch.get_rng_state()
        _, leaves, local = self._parameters(args, kwargs, chosen)
        torch.set_rng_state(random)
        shared = {n: leaves[n] for n in sorted(leaves) if n not in local}
        shapes = {n: tuple(p.shape) for n, p in shared.items()}
        if self.shards.differ(zlib.crc32(repr(shapes).encode())):
            raise CVIError(
                f"shards={sorted(self.shards.plates)}",
                f"other processes have other parameters than {shapes}",
                "the same parameters and shapes in all processes, but for those of single elements",
                "give parameters of elements their event_dim, inside of the plate: "
                'pyro.param("loc", torch.zeros(len(x)), event_dim=0)',
            )
        with torch.no_grad():
            for p, first in zip(
                shared.values(), self.shards.from_first(list(shared.values())), strict=True
            ):
                p.copy_(first)

    def _restore_parameters(self, leaves: Mapping[str, Tensor]) -> None:
        """Give parameters the values of a fit that was loaded."""
        pending, self._pending = self._pending, {}
        missing = sorted(set(pending) - set(leaves))
        if missing:
            raise CVIError(
                f"parameter '{missing[0]}'",
                "it was saved, and the model does not have it",
                f"one of {sorted(leaves)}",
                "load into a CVI of the same model and guides",
            )
        with torch.no_grad():
            for name, value in pending.items():
                leaves[name].copy_(value)

    # --- new data ----------------------------------------------------------------------------------

    @public_call
    def local_posteriors(
        self,
        *args: Any,
        plates: Sequence[str] | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> AutoCVI:
        """A guide for new rows, of any number: q of the sites they share is the fitted one.

        The local latents of the rows (states of a mixture, scores of a factor model, topics of a
        document) are brought to their optimum. The guide that comes back is an ordinary one:
        `posterior(site)`, `median`, sampling, `Predictive`.

        Arguments:
            plates: the plates of the new rows; those whose size differs from the fit, if not given.
            chunk_size: rows at a time; tensors that have the rows along their first axis are cut.

        Example:
            >>> import pyro, torch, pyro.distributions as dist
            >>> from pyro_cvi import CVI, AutoCVI
            >>> def model(x):
            ...     with pyro.plate("components", 2):
            ...         mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
            ...     with pyro.plate("rows", len(x)):
            ...         z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            ...         pyro.sample("x", dist.Normal(mu[z], 1.0), obs=x)
            >>> cvi = CVI(model, AutoCVI(model))
            >>> result = cvi.run(torch.tensor([-5.0, -4.0, 5.0, 6.0]))
            >>> new = cvi.local_posteriors(torch.tensor([-4.5, 4.5, 5.5]))
            >>> state = new.posterior("z").probs.argmax(-1)
            >>> bool(state[0] != state[1]), bool(state[1] == state[2])
            (True, True)
        """
        with torch.enable_grad():
            return local_posteriors(
                self.model,
                self._alone("local_posteriors"),
                args,
                kwargs,
                plates=plates,
                chunk_size=chunk_size,
                sampling=self.sampling,
                seed=self._sweeper.seed,
            )

    @public_call
    def log_predictive(
        self,
        *args: Any,
        plates: Sequence[str] | None = None,
        num_samples: int = 100,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """log p(row | data) of every held-out row, shape (rows,); the mean over rows is the usual score.

        An average over draws of the fitted sites, with the local latents integrated out (see
        `pyro_cvi.prediction`). Arguments as for `local_posteriors`.
        """
        with torch.enable_grad():
            return log_predictive(
                self.model,
                self._alone("log_predictive"),
                args,
                kwargs,
                plates=plates,
                num_samples=num_samples,
                chunk_size=chunk_size,
            )

    @public_call
    def forecast(self, *args: Any, num_samples: int = 100, **kwargs: Any) -> dict[str, Tensor]:
        """Draws of what comes after the data: p(z_new, x_new | data), `(num_samples, *shape)` each.

        The arguments are those of a model that goes on for longer: sites that are larger than in the fit
        begin with a draw of their posterior and go on as the model says, and so do sites with new names
        (the later steps of a loop). Give it no data where it is to draw them.

        Example:
            >>> import pyro, torch, pyro.distributions as dist
            >>> from pyro_cvi import CVI, AutoCVI
            >>> def model(T, x=None):
            ...     step = pyro.sample("step", dist.Normal(torch.zeros(T), 0.1).to_event(1))
            ...     with pyro.plate("time", T):
            ...         return pyro.sample("x", dist.Normal(step.cumsum(0), 0.1), obs=x)
            >>> cvi = CVI(model, AutoCVI(model))
            >>> result = cvi.run(20, torch.ones(20))
            >>> cvi.forecast(25, num_samples=10)["x"][:, 20:].shape
            torch.Size([10, 5])
        """
        return forecast(self.model, self._alone("forecast"), args, kwargs, num_samples)

    # --- helpers -----------------------------------------------------------------------------------

    def _evaluator_for(self, prepared: Prepared) -> Evaluator:
        beliefs = self._own.beliefs()
        known = self._evaluator
        if known is not None and known[0] is prepared:
            before = known[1].beliefs
            # Beliefs about a window are made anew for each step, though nothing may have changed.
            if all(before[n] is b or is_of(before[n], b.tensors) for n, b in beliefs.items()):
                return known[1]
        evaluator = Evaluator(prepared.plan, beliefs, self.shards)
        self._evaluator = (prepared, evaluator)
        return evaluator

    def _evaluator_of(self, given: Sequence[_Given]) -> Evaluator:
        """The evaluator of the model, or of its mean over draws of the other guides."""
        first = self._evaluator_for(given[0].prepared)
        if len(given) == 1:
            return first
        others = [Evaluator(g.prepared.plan, first.beliefs, self.shards) for g in given[1:]]
        return Particles([first, *others])

    def _elbos(self, evaluator: Evaluator, given: Sequence[_Given], sampled: float) -> list[float]:
        """The ELBO given each draw of the other guides; `sampled` is its part from sampled factors."""
        return [
            part.elbo() + sampled - (0.0 if g.draw is None else self._log_q(g.draw))
            for part, g in zip(evaluator.parts, given, strict=True)
        ]

    def _check_particles(self, prepared: Prepared) -> None:
        sampled = sorted(prepared.plan.sampled_sites())
        if self._particles > 1 and sampled:
            raise CVIError(
                "CVI",
                f"loss has num_particles={self._particles}, and {sampled[:3]} are sampled",
                "one draw of the other guides a step where factors of AutoCVI's sites are sampled",
                "CVI(model, guide, num_samples=...) for more draws of these sites, and "
                "num_particles=1",
            )

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window
    ) -> tuple[Callable[..., Any], Draw | None]:
        """The model given a draw of the other guides, if there are any."""
        if self._others is None:
            return self.model, None
        draw = self._others.draw(args, kwargs, chosen, self.shards)
        return draw.given(self.model), draw

    def _log_q(self, draw: Draw) -> float:
        """log q of a draw of the other guides, over all processes."""
        own, common = (float(d.log_q.detach()) for d in (draw.own, draw.common))
        return self.shards.number(own) + common

    def _share_start(self, evaluator: Evaluator) -> None:
        """All processes begin where the first one does."""
        for block in evaluator.plan.blocks:
            if not evaluator.is_own(block):
                old = evaluator.beliefs[block.name]
                new = old.like(self.shards.from_first(old.tensors))
                assert new is not None
                evaluator.set(block.name, new)

    def _check_shards(self, prepared: Prepared) -> None:
        """One plan in all processes, in which no factor joins elements of several."""
        plan, where = prepared.plan, f"shards={sorted(self.shards.plates)}"
        unknown = sorted(self.shards.plates - set(prepared.sizes))
        if unknown:
            raise CVIError(
                where,
                f"the model has no plate {unknown[:1]}",
                f"one of {sorted(prepared.sizes)}",
                "name the plate of the rows",
            )
        own = {b.name for b in plan.blocks if is_own(plan, self.shards, b)}
        joined = [f for f in plan.factors if f.blocks & own and not self.shards.hold(f.plates)]
        if joined:
            raise CVIError(
                f"factor '{joined[0].name}'",
                f"it is outside of the plates {where}, and reads {sorted(joined[0].blocks & own)} "
                "inside of them, of which other processes have other elements",
                "factors of single elements",
                "put its statement inside of the plate, or fit in one process",
            )
        parts = [(b.name, b.family.name, b.structure) for b in plan.blocks]
        how = [(f.name, sorted((s, h.kind) for s, h in f.how.items())) for f in plan.factors]
        if self.shards.differ(zlib.crc32(repr((parts, how)).encode())):
            raise CVIError(
                where,
                "the model has another plan in other processes",
                "one model, of which only the elements of these plates differ",
                "compare print(pyro_cvi.explain(model, *args)) of the processes",
            )

    def _alone(self, what: str) -> AutoCVI:
        """CVI's own guide, where it is the only one."""
        if self._others is not None:
            raise CVIError(
                f"CVI.{what}",
                "some sites belong to other guides than AutoCVI",
                "one AutoCVI of all sites",
                "use pyro.infer.Predictive(model, guide=cvi.guide)",
            )
        return self._own

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window, **options: bool
    ) -> list[_Given]:
        """The model given each draw of the other guides, the draw, and the analysis of that model.

        Plates see the elements of the other guides where these have opened them, and the same for each
        draw. The first one is what the guide knows of the model.
        """
        found: list[_Given] = []
        for _ in range(self._particles):
            model, draw = self._given(args, kwargs, chosen)
            prepared = self._own.prepare(
                model, args, kwargs, chosen if draw is None else {**chosen, **draw.indices},
                beside=None if draw is None else draw.parameters, spread=self.shards.plates, **options,
            )  # fmt: skip
            found.insert(0, _Given(model, draw, prepared))
            chosen = {**chosen, **prepared.subsample}
        return found

    def _sampler(
        self, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any],
        model: Callable[..., Any] | None = None,
    ) -> Sampler:  # fmt: skip
        """Draws of a model; of that of the fit, if none is given."""
        model = self.model if model is None else model
        plan = prepared.plan
        call = Call(model, args, kwargs, plan.latents, prepared.nesting, prepared.subsample)
        return Sampler(plan, call, self.sampling, self.shards)

    def _sampled_value(
        self,
        evaluator: Evaluator,
        model: Callable[..., Any],
        prepared: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float:
        """The part of the ELBO from sampled factors, by new draws."""
        if not prepared.plan.sampled_sites():
            return 0.0
        sampler = self._sampler(prepared, args, kwargs, model)
        return sampler.estimate(evaluator, {}, gradient=False, seed=self._sweeper.seed).value

    def _is_converged(self, progress: Progress) -> bool:
        plan = self._own.plan
        if plan.sampled_sites() or plan.learns:
            return False  # what is sampled has a rule of its own: see `Averaging`
        if plan.stochastic:
            return progress.tol > 0 and progress.gains[-1:] == [0.0]
        return progress.is_end()

    def _final_loss(self, losses: list[float]) -> float:
        """The last loss; of a noisy one the mean of the last tenth, which says more."""
        if not losses:
            return math.inf
        is_exact = self._own.plan.is_deterministic
        last = losses[-1:] if is_exact else losses[-max(1, len(losses) // 10) :]
        return sum(last) / len(last)

    def _not_finite(self, evaluator: Evaluator, elbo: float) -> str:
        names = [
            f.name
            for f in evaluator.plan.factors
            if not f.sampled and not bool(evaluator.factor(f).isfinite())
        ]
        where = f"factor '{names[0]}'" if names else "the ELBO"
        return message(
            where,
            f"the expected log density is not finite (ELBO {elbo})",
            "finite data and covariates",
            "check the inputs for NaN, infinities and values far outside the model's range, and what "
            "init_loc_fn gives; where the model factors a matrix, use float64 or add to its diagonal",
        )

    # --- parameters --------------------------------------------------------------------------------

    def _along(self, draws: Sequence[Draw], evaluator: Evaluator) -> dict[str, list[Tensor | None]]:
        """What the bound gains by the draws' dependence on CVI's own blocks: see `Recognition`.

        For each block a gradient in its mean parameters, as its messages are.
        """
        spread, rest = evaluator.split_expectations()
        for draw in draws:
            spread = spread - draw.own.entropy / len(draws)
            rest = rest - draw.common.entropy / len(draws)
        found: dict[str, list[Tensor | None]] = {}
        for leaves in (x for draw in draws for x in draw.along):
            flat = [x for own in leaves.values() for x in own]
            grads = _gradients(rest, flat)
            own = _gradients(spread, flat)
            if self.shards.plates:
                pairs = zip(own, flat, strict=True)
                own = list(self.shards.sums([or_zeros(g, x) for g, x in pairs]))
            grads = [sum_gradients(a, b) for a, b in zip(grads, own, strict=True)]
            for name, tensors in leaves.items():
                new, grads = grads[: len(tensors)], grads[len(tensors) :]
                old = found.get(name, [None] * len(tensors))
                found[name] = [sum_gradients(a, b) for a, b in zip(old, new, strict=True)]
        return found

    def _expected(self, elbo: float) -> float:
        """The ELBO of steps before, as a baseline of the score function."""
        known = elbo if self._baseline is None else self._baseline
        self._baseline = known + _FORGET * (elbo - known)
        return known

    def _check_params(self, prepared: Prepared) -> None:
        if prepared.parameters and self.optim is None:
            raise CVIError(
                "CVI",
                "the model, or a guide beside AutoCVI, has pyro.param values (or module parameters) "
                "that require gradients",
                "an optimiser for them",
                'pass optim=pyro.optim.Adam({"lr": 0.01}), or switch requires_grad off to hold '
                "them fixed",
            )

    def _learn(
        self, evaluator: Evaluator, prepared: Prepared, sampler: Callable[[], Sampler],
        draws: Sequence[Draw | None], elbos: Sequence[float],
    ) -> None:  # fmt: skip
        """One step of the user's optimiser on the parameters, with the posterior held fixed.

        Of processes the pseudo-observations are held: their posterior moves with the prior. Parameters
        of other guides have a gradient through their draw, and through its density.
        """
        leaves = list(prepared.parameters.values())
        if not leaves:
            return
        assert self.optim is not None
        grads: list[Tensor | None] = [None] * len(leaves)
        prior = evaluator.with_learnt_priors()
        spread, rest = evaluator.split_expectations()
        rest = prior + rest
        known = self._expected(sum(elbos) / len(elbos))
        own_names = of_elements(prepared.trace, self.shards)
        for draw, elbo in zip(draws, elbos, strict=True):
            if draw is not None:
                own_names |= draw.local
                own_score = (elbo - known) * draw.own.score
                common_score = (elbo - known) * draw.common.score
                spread = spread + (own_score - draw.own.entropy) / len(draws)
                rest = rest + (common_score - draw.common.entropy) / len(draws)
        if not self.shards.plates:
            spread, rest = spread + rest, torch.zeros((), device="cpu")
        local = [i for i, n in enumerate(prepared.parameters) if n in own_names]
        for part, summed in ((spread, True), (rest, False)):
            own = _gradients(part, leaves)
            if summed and self.shards.plates:
                at = [i for i in range(len(leaves)) if i not in local]
                sums = self.shards.sums([or_zeros(own[i], leaves[i]) for i in at])
                for i, total in zip(at, sums, strict=True):
                    own[i] = total
            grads = [sum_gradients(g, h) for g, h in zip(grads, own, strict=True)]
        if prepared.plan.sampled_sites():
            estimate = sampler().estimate(
                evaluator, self._sweeper.control, parameters=leaves, local=local,
                seed=self._sweeper.next_seed(),
            )  # fmt: skip
            grads = [sum_gradients(a, b) for a, b in zip(grads, estimate.parameters, strict=True)]
        for name, g in zip(prepared.parameters, grads, strict=True):
            if g is not None and not all_finite(g):
                raise CVIError(
                    f"parameter '{name}'",
                    "the gradient of the bound is not finite",
                    "finite gradients, else the optimiser would spoil the parameter for good",
                    "check the model at the present values of its parameters",
                )
        for p, g in zip(leaves, grads, strict=True):
            p.grad = torch.zeros_like(p) if g is None else -g
        self.optim(set(leaves))
        for p in leaves:
            p.grad = torch.zeros_like(p)
        self._evaluator = None


def _gradients(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """d value / d leaves, keeping the graph."""
    if not value.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(value, list(leaves), retain_graph=True, allow_unused=True))


def _is_count(x: Any, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_power_of_four(i: int) -> bool:
    return i.bit_count() == 1 and i.bit_length() % 2 == 1


def _is_schedule(annealing: Any, num_steps: int) -> bool:
    try:
        temperature, steps = annealing
        return temperature >= 1 and 0 <= steps < max(num_steps, 1)
    except (TypeError, ValueError):
        return False


def _progress_bar(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="CVI")
