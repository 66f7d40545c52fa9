"""CVI: step, run and evaluate_loss. The loop and nothing else.

    natural_b  <-  (1 - rho) natural_b + rho * sum_factors grad_mean E_q[log p]        for every block b

A block with exact messages only takes rho = 1, its optimum given the rest. A block with quadrature
tries rho = 1 and is accepted when the ELBO rises by at least KL(q || q') / rho, as a mirror step must;
else rho is halved. Sampled and subsampled blocks follow a Robbins-Monro sequence.

Reference: M. E. Khan, W. Lin (2017), Conjugate-Computation Variational Inference, arXiv 1703.04265.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_cvi.errors import CVIError, message
from pyro_cvi.explain import Report, make_report
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.prepared import Prepared
from pyro_cvi.graph.sampling import Sampler
from pyro_cvi.graph.symbolic import Call
from pyro_cvi.guide import AutoCVI
from pyro_cvi.updates import Belief, GaussianBelief, Step

__all__ = ["CVI", "RunResult"]

_LOSSES = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO, TraceGraph_ELBO)
_HALVINGS = 40
_NARROWINGS = 8
_SLACK = {torch.float64: 1e-12, torch.float32: 2e-6}


@dataclass
class RunResult:
    """What `CVI.run` did: the loss after each step, how many, and why it stopped."""

    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    converged: bool = False
    reason: str = ""
    seconds: float = 0.0


class CVI:
    """Conjugate-computation variational inference, with the call shape of `pyro.infer.SVI`.

    Arguments:
        model: a Pyro model.
        guide: an `AutoCVI`.
        optim: a `PyroOptim`, for the `pyro.param`s of the model only; the posterior needs none.
        loss: accepted for the sake of swapping; one of Trace_ELBO, TraceMeanField_ELBO,
            TraceEnum_ELBO, TraceGraph_ELBO (they are the same objective).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoCVI,
        optim: PyroOptim | None = None,
        loss: ELBO | None = None,
    ) -> None:
        if not isinstance(guide, AutoCVI):
            raise CVIError(
                message(
                    "CVI", f"the guide is a {type(guide).__name__}", "an AutoCVI",
                    "CVI(model, AutoCVI(model)); use pyro.infer.SVI for other guides",
                )
            )  # fmt: skip
        if optim is not None and not isinstance(optim, PyroOptim):
            raise CVIError(
                message(
                    "CVI", f"optim is a {type(optim).__name__}", "a pyro.optim.PyroOptim or None",
                    'pyro.optim.Adam({"lr": 0.01}); it is for pyro.param only',
                )
            )  # fmt: skip
        if loss is not None and type(loss) not in _LOSSES:
            names = ", ".join(c.__name__ for c in _LOSSES)
            raise CVIError(
                message(
                    "CVI", f"the loss is {type(loss).__name__}", f"the ELBO ({names}) or None",
                    "leave loss out; CVI maximises the ELBO and no other bound",
                )
            )  # fmt: skip
        self.model, self.guide, self.optim = model, guide, optim
        self.loss: ELBO = Trace_ELBO() if loss is None else loss
        self._evaluator: tuple[Prepared, Evaluator] | None = None
        self._rho: dict[str, float] = {}
        self._control: dict[str, tuple[Tensor, ...]] = {}
        self._counts: dict[str, Step] = {}
        self._time = 0
        self._rate = 0.5
        self._sampled_value = 0.0
        self._before: dict[str, Belief] = {}

    # --- public ------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One sweep over the blocks; the negative ELBO of the state it leaves, summed over data.

        Where something is sampled or subsampled the return value is an estimate. An error leaves the
        posterior as it was.
        """
        with torch.enable_grad(), self.guide.undone_on_error():
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        prepared = self.guide.prepare(self.model, args, kwargs)
        self._check_params(prepared)
        before, control = self.guide.beliefs(), dict(self._control)
        try:
            evaluator = self._evaluator_for(prepared)
            self._narrow(evaluator)
            self._sweep(evaluator, prepared, args, kwargs)
            elbo = evaluator.elbo() + self._sampled_value
            finite = all(b.is_finite() for b in evaluator.beliefs.values())
            if not math.isfinite(elbo) or not finite:
                raise CVIError(self._not_finite(evaluator, elbo))
            if prepared.plan.learns:
                self._learn(evaluator, prepared, args, kwargs)
        except BaseException:
            self._evaluator, self._control = None, control
            raise
        for block in prepared.plan.blocks:
            if evaluator.beliefs[block.name] is not before[block.name]:
                self.guide.set_belief(block, evaluator.beliefs[block.name])
        self._before = before
        self._time += 1
        return -elbo

    def _narrow(self, evaluator: Evaluator) -> None:
        """Narrow the start where exp overflows under its spread, or nearly does.

        Nearly: E exp(f) = exp(m + v/2) may be finite and beyond any use, as Newton's steps undo about
        one nat of it each. The bound itself says which of two starts is better.
        """
        if self._time > 0:
            return
        explosive = any(
            "E exp" in h.reason for f in evaluator.plan.factors for h in f.how.values()
        )
        elbo = evaluator.elbo()
        for _ in range(_NARROWINGS):
            finite = math.isfinite(elbo)
            if finite and not explosive:
                return
            kept = dict(evaluator.beliefs)
            for name, b in kept.items():
                if isinstance(b, GaussianBelief):
                    evaluator.set(name, GaussianBelief(b.loc, 100 * b.precision))
            narrower = evaluator.elbo()
            if finite and not narrower > elbo:
                for name, b in kept.items():
                    evaluator.set(name, b)
                return
            elbo = narrower

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO now; changes nothing.

        Where nothing is sampled or subsampled, Pyro's random state is left as it was too.
        """
        evaluator, random = self._evaluator, torch.get_rng_state()
        try:
            with torch.enable_grad(), self.guide.undone_on_error(always=True):
                prepared = self.guide.prepare(self.model, args, kwargs)
                loss = -self._elbo(self._evaluator_for(prepared), prepared, args, kwargs)
            if not prepared.plan.stochastic and not prepared.plan.sampled_sites():
                torch.set_rng_state(random)
            return loss
        finally:
            self._evaluator = evaluator

    def run(
        self,
        *args: Any,
        num_steps: int = 100,
        tol: float = 1e-6,
        progress: bool = False,
        **kwargs: Any,
    ) -> RunResult:
        """Step until the relative change of the loss and the step's length in nats are below `tol`.

        A run with samples or subsampling takes all `num_steps`, for its loss is an estimate.
        """
        if num_steps < 0:
            raise CVIError(f"num_steps is {num_steps}; expected zero or more")
        result = RunResult(reason="num_steps reached")
        start = time.perf_counter()
        bar = _progress_bar(num_steps) if progress else None
        for _ in range(num_steps):
            loss = self.step(*args, **kwargs)
            result.losses.append(loss)
            result.num_steps += 1
            if bar is not None:
                bar.set_postfix_str(f"loss {loss:.4f}, moved {self._moved():.1e} nats")
                bar.update()
            if self._is_converged(result.losses, tol):
                result.converged = True
                result.reason = f"relative change and movement below {tol:g}"
                break
        if bar is not None:
            bar.total = result.num_steps
            bar.refresh()
            bar.close()
        result.seconds = time.perf_counter() - start
        return result

    def explain(self) -> Report:
        """What was done in each factor for each site, and why; print it."""
        return make_report(self.guide.plan, self._counts)  # raises before the first step

    # --- one sweep ---------------------------------------------------------------------------------

    def _evaluator_for(self, prepared: Prepared) -> Evaluator:
        beliefs = self.guide.beliefs()
        known = self._evaluator
        if known is not None and known[0] is prepared:
            same = all(known[1].beliefs[n] is b for n, b in beliefs.items())
            if same:
                return known[1]
        evaluator = Evaluator(prepared.plan, beliefs)
        self._evaluator = (prepared, evaluator)
        return evaluator

    def _sweep(
        self,
        evaluator: Evaluator,
        prepared: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        plan = prepared.plan
        self._sampled_value = 0.0
        noisy = frozenset().union(*(f.blocks for f in plan.factors if f.sampled))
        for block in plan.blocks:
            if block.size == 0 or block.name in noisy:
                continue
            if plan.stochastic:
                self._noisy_step(evaluator, block, None, (self._time + 1.0) ** -0.7)
            elif plan.is_exact(block):
                self._exact_step(evaluator, block)
            else:
                self._searched_step(evaluator, block)
        if noisy:
            self._sampled_sweep(evaluator, self._sampler(prepared, args, kwargs), noisy)

    def _sampled_sweep(self, evaluator: Evaluator, sampler: Sampler, noisy: frozenset[str]) -> None:
        """One damped step of all blocks that sampled factors touch, undone if it clearly loses.

        The ELBO before and after is compared on common random numbers; a fall of more than two
        standard errors means the step was too long for the noise of its gradient.
        """
        seed = int(torch.randint(2**31, ()))
        plan, old = evaluator.plan, dict(evaluator.beliefs)
        before = sampler.estimate(evaluator, self._control, seed=seed)
        exact = evaluator.elbo()
        rho = self._rate * (1 + self._time / 20) ** -0.7
        controls = dict(self._control)
        for block in plan.blocks:
            if block.name in noisy and block.size:
                self._noisy_step(evaluator, block, before.messages.get(block.name), rho)
        after = sampler.estimate(evaluator, self._control, gradient=False, seed=seed + 1)
        again = sampler.estimate_at(old, evaluator, seed=seed + 1)
        change = torch.tensor(after.values) - torch.tensor(again.values)
        gain = evaluator.elbo() - exact + float(change.mean())
        error = float(change.std()) / math.sqrt(len(after.values))
        if not gain >= -2 * error:
            for name in noisy:
                evaluator.set(name, old[name])
            self._control = controls
            self._rate = max(self._rate / 2, 1e-4)
            self._sampled_value = again.value
        else:
            self._rate = min(1.0, self._rate * 1.2)
            self._sampled_value = after.value

    def _sampler(
        self, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sampler:
        plan = prepared.plan
        call = Call(self.model, args, kwargs, plan.latents, prepared.nesting, prepared.subsample)
        return Sampler(plan, call, self.guide.num_samples)

    def _exact_step(self, evaluator: Evaluator, block: Block) -> None:
        belief, step = evaluator.beliefs[block.name].moved(evaluator.message(block), 1.0)
        if step.improper:
            raise CVIError(
                message(
                    f"block '{block.name}'",
                    "its conditional posterior is improper (a likelihood and prior that do not "
                    "determine it)",
                    "a proper prior on every latent",
                    "give the site a proper prior, or remove the mask on it",
                )
            )
        evaluator.set(block.name, belief)

    def _searched_step(self, evaluator: Evaluator, block: Block) -> None:
        """Mirror step with the acceptance test: rise of the ELBO >= KL(q || q') / rho."""
        name = block.name
        old, leaves = evaluator.beliefs[name], evaluator.leaves[name]
        version = evaluator.version(name)
        before = evaluator.local(block)
        gradient = evaluator.message(block)
        cache = evaluator.forget(evaluator.plan.factors_of(name))
        slack = _SLACK.get(before.dtype, 1e-6) * float(before.abs() + 1)
        rho = self._rho.get(name, 1.0)
        for _ in range(_HALVINGS):
            belief, step = old.moved(gradient, rho)
            if belief.is_finite():
                evaluator.set(name, belief)
                rise = float(evaluator.local(block) - before)
                if rise >= float(old.kl(belief)) / rho - slack:
                    self._count(name, step)
                    self._rho[name] = min(1.0, 2 * rho)
                    return
                evaluator.restore(name, old, leaves, version, cache)
            rho /= 2
        self._rho[name] = 1.0  # no step rises: this is the optimum as far as rounding can tell

    def _noisy_step(
        self, evaluator: Evaluator, block: Block, sampled: list[Tensor | None] | None, rho: float
    ) -> None:
        belief = evaluator.beliefs[block.name]
        gradient = evaluator.message(block)
        if sampled is not None:
            gradient = [_sum(a, b) for a, b in zip(gradient, sampled, strict=True)]
            if isinstance(belief, GaussianBelief) and sampled[0] is not None:
                self._keep_control(block.name, belief, sampled, rho)
        moved, step = belief.moved(gradient, rho)
        if moved.is_finite():
            evaluator.set(block.name, moved)
            self._count(block.name, step)

    def _keep_control(
        self, name: str, belief: GaussianBelief, sampled: list[Tensor | None], rho: float
    ) -> None:
        g_loc, g_cov = sampled
        assert g_loc is not None and g_cov is not None
        new = (g_loc - 2 * (g_cov @ belief.loc.unsqueeze(-1)).squeeze(-1), g_cov)
        old = self._control.get(name)
        if old is not None:
            new = tuple(o + rho * (n - o) for o, n in zip(old, new, strict=True))  # type: ignore[assignment]
        self._control[name] = new

    def _count(self, name: str, step: Step) -> None:
        old = self._counts.get(name, Step())
        self._counts[name] = Step(
            old.improper + step.improper,
            old.shortened + step.shortened,
            old.retracted + step.retracted,
        )

    def _elbo(
        self,
        evaluator: Evaluator,
        prepared: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float:
        elbo = evaluator.elbo()
        if prepared.plan.sampled_sites():
            sampler = self._sampler(prepared, args, kwargs)
            elbo += sampler.estimate(evaluator, self._control, gradient=False).value
        return elbo

    def _moved(self) -> float:
        """KL(before || after) of the last step, in nats."""
        total = 0.0
        for block in self.guide.plan.blocks:
            old, new = self._before[block.name], self.guide.belief(block)
            if new is not old:
                total += float(old.kl(new))
        return total

    def _is_converged(self, losses: list[float], tol: float) -> bool:
        plan = self.guide.plan
        if plan.sampled_sites() or plan.stochastic or plan.learns or len(losses) < 2:
            return len(losses) >= 2 and tol > 0 and losses[-1] == losses[-2] and not plan.learns
        scale = tol * max(abs(losses[-1]), 1.0)
        return abs(losses[-2] - losses[-1]) <= scale and self._moved() <= scale

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
            "check the inputs for NaN, infinities and values far outside the model's range",
        )

    # --- parameters --------------------------------------------------------------------------------

    def _check_params(self, prepared: Prepared) -> None:
        if prepared.plan.learns and self.optim is None:
            raise CVIError(
                message(
                    "CVI",
                    "the model has pyro.param values (or module parameters) that require gradients",
                    "an optimiser for them",
                    'pass optim=pyro.optim.Adam({"lr": 0.01}), or switch requires_grad off to hold '
                    "them fixed",
                )
            )

    def _learn(
        self,
        evaluator: Evaluator,
        prepared: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """One step of the user's optimiser on the parameters, with the posterior held fixed."""
        assert self.optim is not None
        leaves = list(prepared.parameters.values())
        grads: list[Tensor | None] = [None] * len(leaves)
        elbo = evaluator.expectations()
        if elbo.requires_grad:
            grads = list(torch.autograd.grad(elbo, leaves, allow_unused=True))
        if prepared.plan.sampled_sites():
            sampler = self._sampler(prepared, args, kwargs)
            sampled = sampler.estimate(evaluator, self._control, parameters=leaves).parameters
            grads = [_sum(a, b) for a, b in zip(grads, sampled, strict=True)]
        for name, g in zip(prepared.parameters, grads, strict=True):
            if g is not None and not bool(g.isfinite().all()):
                raise CVIError(
                    message(
                        f"parameter '{name}'",
                        "the gradient of the bound is not finite",
                        "finite gradients, else the optimiser would spoil the parameter for good",
                        "check the model at the present values of its parameters",
                    )
                )
        for p, g in zip(leaves, grads, strict=True):
            p.grad = torch.zeros_like(p) if g is None else -g
        self.optim(set(leaves))
        for p in leaves:
            p.grad = torch.zeros_like(p)
        self._evaluator = None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _progress_bar(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="CVI")
