"""Topics of the AP corpus: how good is the fit after how much time, beside scikit-learn's LDA?

Model, with K = 50 and both priors 0.1, over flat lists of tokens:

    theta_d ~ Dirichlet(0.1);            phi_k ~ Dirichlet(0.1)
    z_n ~ Categorical(theta[doc_n]);     w_n ~ Categorical(phi[z_n])

scikit-learn's LatentDirichletAllocation has the same model and the same posterior q(theta) q(phi) q(z),
and optimises the same bound, "batch" (an iteration brings all documents to their optimum) or "online"
(steps of 128 documents). Each method starts at random, as it does by default, in the same dtype. CVI
anneals its first sweeps, as its documentation advises for topics; there is no score inside of these.

Score: document completion. One tenth of the documents is held out; a random half of each one's tokens is
seen, the other half is scored: mean of log sum_k E[theta_dk] E[phi_kw], with theta from 100 steps of
variational Bayes on the seen half at fixed topics E[phi]. One numpy code scores all methods, from their
phi ~ Dirichlet(lambda) alone. Scores are taken off the clock, at growing numbers of iterations;
a method's score at a time is that of the last iteration before it.

Each method runs in a process of its own, so that the peak of memory is its own. scikit-learn uses one
core (its n_jobs are processes), torch what it is given.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import (
    Row,
    arguments,
    arrays,
    fit,
    in_child,
    machine,
    peak_gb,
    report,
    run,
    versions,
    warm_up,
)
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

PRIOR = 0.1
METHODS = ("cvi", "batch", "online")
TIMES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
GROWTH = 1.4
ANNEALING = (1.5, 20)
"""Of CVI's second to 21st sweep."""
FOLD_IN = 100
MOST_BYTES = 16 << 30
"""Of address space, for CVI: a fit that wants more fails, and not the machine."""


# --- data and score ---------------------------------------------------------------------------


def split(counts: csr_matrix, rng: np.random.Generator) -> dict[str, csr_matrix]:
    """Documents to fit; of the others, which are a tenth, the halves that are seen and scored."""
    order = rng.permutation(counts.shape[0])
    cut = counts.shape[0] // 10
    held_out = counts[np.sort(order[:cut])]
    seen = held_out.copy()
    seen.data = rng.binomial(held_out.data, 0.5)
    scored = held_out - seen
    seen.eliminate_zeros()
    scored.eliminate_zeros()
    return {"train": counts[np.sort(order[cut:])], "seen": seen, "scored": scored}


def corpus(small: bool) -> csr_matrix:
    d = arrays("ap_corpus")
    counts = csr_matrix(
        (d["counts"].astype(np.int64), d["indices"].astype(np.int64), d["indptr"]),
        shape=(len(d["indptr"]) - 1, len(d["vocab"])),
    )
    if not small:
        return counts
    counts = counts[:150]
    common = np.argsort(-np.asarray(counts.sum(0)).ravel(), kind="stable")[:300]
    return counts[:, np.sort(common)]


def score(concentration: NDArray[Any], seen: csr_matrix, scored: csr_matrix) -> float:
    """Mean log probability of the scored tokens; `concentration` (K, V) is that of the topics."""
    from scipy.special import digamma

    phi = concentration.astype(np.float64)
    phi /= phi.sum(1, keepdims=True)
    total = 0.0
    for d in range(seen.shape[0]):
        a, b = slice(*seen.indptr[d : d + 2]), slice(*scored.indptr[d : d + 2])
        words, n = phi[:, seen.indices[a]], seen.data[a]
        gamma = np.full(len(phi), PRIOR + n.sum() / len(phi))
        for _ in range(FOLD_IN):
            weight = np.exp(digamma(gamma))
            gamma = PRIOR + weight * (words @ (n / (weight @ words)))
        theta = gamma / gamma.sum()
        total += float(scored.data[b] @ np.log(theta @ phi[:, scored.indices[b]]))
    return total / float(scored.data.sum())


# --- the methods ------------------------------------------------------------------------------


@dataclass
class Curve:
    """Seconds on the clock, iterations, and score of each point; stops after `cap` seconds."""

    cap: float
    judge: Callable[[NDArray[Any]], float]
    seconds: float = 0.0
    iterations: float = 0.0
    points: list[tuple[float, float, float]] = field(default_factory=list)

    def note(self, concentration: NDArray[Any]) -> None:
        self.points.append((self.seconds, self.iterations, self.judge(concentration)))

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.cap

    def at(self, seconds: float) -> float | None:
        """The score of the last point before that time."""
        return next((s for t, _, s in reversed(self.points) if t <= seconds), None)


def model(doc: Tensor, word: Tensor, documents: int, words: int, K: int) -> None:
    prior = torch.tensor(PRIOR)
    with pyro.plate("topics", K):
        phi = pyro.sample("phi", dist.Dirichlet(prior.expand(words)))
    with pyro.plate("documents", documents):
        theta = pyro.sample("theta", dist.Dirichlet(prior.expand(K)))
    with pyro.plate("tokens", len(word)):
        z = pyro.sample("z", dist.Categorical(theta[doc]))
        pyro.sample("w", dist.Categorical(phi[z]), obs=word)


def with_cvi(curve: Curve, train: csr_matrix, K: int) -> dict[str, Any]:
    """`run` in growing pieces, of which the second is annealed."""
    pyro.set_rng_seed(0)
    documents, words = train.shape
    doc = np.repeat(np.arange(documents), np.diff(train.indptr))
    tokens = (np.repeat(a, train.data) for a in (doc, train.indices))
    args = (*(torch.from_numpy(a.astype(np.int64)) for a in tokens), documents, words, K)
    before = peak_gb()
    start = time.perf_counter()
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    losses: list[float] = []
    goal = 1.0
    while not curve.is_over:
        try:
            steps = round(goal) - len(losses)
            cooling = None
            if len(losses) == 1:
                steps, cooling = ANNEALING[1] + 1, ANNEALING
            done = cvi.run(*args, num_steps=steps, tol=-1.0, annealing=cooling)
        except RuntimeError as e:
            if "memory" not in str(e):
                raise
            return {"before_gb": before, "failed": str(e)}
        curve.seconds += time.perf_counter() - start
        losses += done.losses
        curve.iterations = len(losses)
        curve.note(guide.posterior("phi").concentration.numpy())
        goal = max(len(losses) + 1, len(losses) * GROWTH)
        start = time.perf_counter()
    return {"before_gb": before, "losses": losses, "tokens": len(args[0])}


class Enough(Exception):
    """Raised out of scikit-learn's `fit` when its time is over."""


def with_sklearn(
    curve: Curve, train: csr_matrix, K: int, method: str, dtype: Any
) -> dict[str, Any]:
    """scikit-learn's own `fit`, with a clock in it."""
    from sklearn.decomposition import LatentDirichletAllocation

    X = train.astype(dtype)
    before = peak_gb()
    batch_size = 128
    steps = 1 if method == "batch" else -(-X.shape[0] // batch_size)
    calls = 0
    goal = 1.0

    class Timed(LatentDirichletAllocation):
        def _em_step(self, *args: Any, **kwargs: Any) -> None:
            nonlocal calls, goal
            start = time.perf_counter()
            super()._em_step(*args, **kwargs)
            curve.seconds += time.perf_counter() - start
            calls += 1
            curve.iterations = calls / steps
            if calls >= round(goal) or curve.is_over:
                curve.note(self.components_)
                goal = max(goal + 1, goal * GROWTH)
            if curve.is_over:
                raise Enough

    lda = Timed(
        K, doc_topic_prior=PRIOR, topic_word_prior=PRIOR, learning_method=method,
        batch_size=batch_size, max_iter=1_000_000, random_state=0,
    )  # fmt: skip
    with suppress(Enough):
        lda.fit(X)
    return {"before_gb": before}


def child(method: str, folder: Path, cap: float, K: int, double: bool) -> None:
    """One method alone; prints its figures as one line of JSON."""
    with np.load(folder / "corpus.npz") as d:
        parts = {
            n: csr_matrix(
                (d[f"{n}_data"], d[f"{n}_indices"], d[f"{n}_indptr"]),
                shape=(len(d[f"{n}_indptr"]) - 1, int(d["words"])),
            )
            for n in ("train", "seen", "scored")
        }
    curve = Curve(cap, lambda c: score(c, parts["seen"], parts["scored"]))
    if method == "cvi":
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        warm_up()
        tiny = torch.arange(20)
        fit((tiny % 4, tiny % 5, 4, 5, 2), 2, model)  # what the first use of each family costs
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        figures = with_cvi(curve, parts["train"], K)
    else:
        dtype = np.float64 if double else np.float32
        figures = with_sklearn(curve, parts["train"], K, method, dtype)
    # the score's own arrays are small beside those of a fit, K x V in float64
    print(json.dumps({**figures, "peak_gb": peak_gb(), "points": curve.points}))


# --- the comparison ---------------------------------------------------------------------------


def rows_of(curves: dict[str, Curve], figures: dict[str, dict[str, Any]], case: str) -> list[Row]:
    names = {"cvi": "CVI", "batch": "scikit-learn, batch", "online": "scikit-learn, online"}
    rows = []
    for method, curve in curves.items():
        if not curve.points:
            rows.append(
                Row(names[method], f"out of {MOST_BYTES >> 30} GiB of memory", None, ">=", 0.0)
            )
            continue
        (first, *_), (seconds, iterations, last) = curve.points[0], curve.points[-1]
        one, many = ("sweep", "sweeps") if method == "cvi" else ("pass", "passes")
        rows += [
            Row(names[method], "seconds until its first score", first),
            Row(names[method], f"score after {seconds:.0f} s, {iterations:.0f} {many}", last),
            Row(names[method], "best score", max(s for *_, s in curve.points)),
            Row(names[method], f"seconds per {one}, mean", seconds / iterations),
        ]
    ours = curves["cvi"]
    for t in TIMES:
        others = [s for m in METHODS[1:] if (s := curves[m].at(t)) is not None]
        mine = ours.at(t)
        if t > ours.cap or not others:
            continue
        what = f"score after {t} s: CVI's less the better of scikit-learn's"
        rows.append(Row(case, what, None if mine is None else mine - max(others), ">=", 0.0))
    for method in METHODS:
        peak = figures[method]["peak_gb"]
        target: tuple[Any, ...] = ("<=", 2.0) if method == "cvi" else ()
        rows.append(Row(names[method], "peak resident memory, GB", peak, *target))
        what = "of it before the fit (libraries, data), GB"
        rows.append(Row(names[method], what, figures[method]["before_gb"]))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cap", type=float, help="seconds per method")
    parser.add_argument("--topics", type=int)
    parser.add_argument("--double", action="store_true", help="float64 in all methods")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cap = options.cap or (2.0 if options.small else 200.0)
    K = options.topics or (5 if options.small else 50)
    if options.child:
        child(options.child[0], Path(options.child[1]), cap, K, options.double)
        return
    import sklearn  # noqa: F401  (the children need it)

    at = machine()
    counts = corpus(options.small)
    parts = split(counts, np.random.default_rng(0))
    documents, words = parts["train"].shape
    tokens = int(parts["train"].sum())
    case = f"{documents} documents, {words} words, {tokens} tokens, K = {K}"
    curves, figures = {}, {}
    with tempfile.TemporaryDirectory() as name:
        content = {
            f"{n}_{key}": getattr(m, key)
            for n, m in parts.items() for key in ("data", "indices", "indptr")
        }  # fmt: skip
        np.savez(Path(name) / "corpus.npz", words=words, **content)
        more = ["--cap", str(cap), "--topics", str(K), *(["--double"] if options.double else [])]
        for method in METHODS:
            figures[method] = in_child(__file__, method, name, *more)
            curves[method] = Curve(cap, lambda _: 0.0, points=figures[method]["points"])
    rows = rows_of(curves, figures, case)
    dtype = "float64" if options.double else "float32"
    report(
        __file__, rows, at, options.small, versions=versions("scikit-learn"), case=case, dtype=dtype,
        cap=cap, **figures,
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
