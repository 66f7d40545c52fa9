"""Gaussian processes of `pyro.contrib.gp` for CVI: kernels, likelihoods and predictions are Pyro's.

    f(x) = m(x) + k(x, Z) L^-T v + (k(x, x) - |L^-1 k(Z, x)|^2)^1/2 e,   v, e ~ N(0, I),  L L^T = k(Z, Z)

`VariationalGP.model` and `VariationalSparseGP.model` sample `f` or `u` and then use the guide's own
moments in its place, so that nothing in their trace says what the data have to do with it. Here the
value that is sampled is the one that is used.

Sources: J. Hensman, A. Matthews, Z. Ghahramani (2015), Scalable variational Gaussian process
classification; V. Adam, P. Chang, M. E. Khan, A. Solin (2021), Dual parameterization of sparse
variational Gaussian processes, for natural gradients with minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.likelihoods import Binary, Gaussian, Likelihood, MultiClass, Poisson
from pyro.contrib.gp.likelihoods.multi_class import _softmax
from pyro.contrib.gp.models import VariationalGP, VariationalSparseGP
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.guide import AutoCVI

__all__ = ["GaussianProcess"]

Observe = Callable[[Tensor], Any]

_MOST_JITTER = 0.1


class GaussianProcess:
    """The model of a variational Gaussian process of `pyro.contrib.gp`, for `CVI` and `AutoCVI`.

    Of a `VariationalSparseGP` the bound is that of Hensman et al. (2015): q(f | u) is the prior's. Its
    latent is v = L^-1 u, so that q(v) stays what it is while the optimiser moves kernel and inducing
    inputs. Of a `VariationalGP` the latent is f itself, a process block: K is not inverted.

    Call it as a model: `model()` with the data of the Gaussian process, or `model(X, y)` with others, of
    as many rows or with a minibatch of them.

    Arguments:
        gp: with the data, or with `num_data` rows of which it gets some at each call.
        batch_size: rows a step, of a sparse model; all by default.
        observe: a function from f, which has the shape of `y`, to the distribution of the data, in the
            place of `gp.likelihood`.
        learn: whether CVI's optimiser moves the parameters of kernel, mean, likelihood and inducing
            inputs; else they are constants, and none is needed.

    Where the kernel's matrix is singular to rounding, `gp.jitter` is raised tenfold until it is not.

    Example:
        >>> import pyro, torch, pyro.contrib.gp as gp
        >>> from pyro_cvi import CVI, AutoCVI
        >>> from pyro_cvi.gp import GaussianProcess
        >>> X = torch.linspace(-1.0, 1.0, 40)
        >>> y = (torch.sin(4 * X) > 0).float()
        >>> sparse = gp.models.VariationalSparseGP(
        ...     X, y, gp.kernels.RBF(1), Xu=X[::5].clone(), likelihood=gp.likelihoods.Binary()
        ... )
        >>> model = GaussianProcess(sparse)
        >>> cvi = CVI(model, AutoCVI(model), optim=pyro.optim.Adam({"lr": 0.05}))
        >>> result = cvi.run(num_steps=30)
        >>> model.store(cvi.guide)
        >>> loc, variance = sparse(torch.tensor([-0.4, 0.4]))
        >>> bool(loc[0] < 0 < loc[1])
        True
    """

    def __init__(
        self,
        gp: VariationalGP | VariationalSparseGP,
        *,
        batch_size: int | None = None,
        observe: Observe | None = None,
        learn: bool = True,
    ) -> None:
        self.gp, self.batch_size, self.learn = gp, batch_size, learn
        self.is_sparse = isinstance(gp, VariationalSparseGP)
        if not isinstance(gp, VariationalGP | VariationalSparseGP):
            raise CVIError(
                "GaussianProcess",
                f"a {type(gp).__name__}",
                "a VariationalGP or VariationalSparseGP of pyro.contrib.gp",
                "train GPRegression and SparseGPRegression by pyro.contrib.gp.util.train: they have "
                "no latent, their posterior is a closed form",
            )
        if batch_size is not None and not (
            self.is_sparse and isinstance(batch_size, int) and batch_size > 0
        ):
            raise CVIError(
                "GaussianProcess",
                f"batch_size={batch_size!r} for a {type(gp).__name__}",
                "a positive number of rows, for a VariationalSparseGP",
                "leave batch_size out, or use inducing inputs",
            )
        _check_names(gp)
        self.observe = _observed_by(gp.likelihood) if observe is None else observe
        self.by_class = observe is None and isinstance(gp.likelihood, MultiClass)
        for module in gp.modules():
            for name, (kind, _) in getattr(module, "_guides", {}).items():
                if kind is not dist.Delta:
                    raise CVIError(
                        f"parameter '{name}' of {type(module).__name__}",
                        f"an autoguide of its own, {kind.__name__}",
                        "a prior (PyroSample) and no call of `autoguide`",
                        "leave `autoguide` out: CVI finds the posterior, `store` sets its median",
                    )

    @property
    def site(self) -> str:
        """The name of the latent, which is `v` (the whitened inducing values) or `f`."""
        name: str = self.gp._pyro_get_fullname("v" if self.is_sparse else "f")
        return name

    def __call__(self, X: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """The model: samples the latent, observes `y`, and returns f for the rows of this call."""
        X, y = self.gp.X if X is None else X, self.gp.y if y is None else y
        if y is None:
            raise CVIError(
                "GaussianProcess",
                "no data y",
                "data to fit to",
                "give y to the Gaussian process or to the model; predict by gp(Xnew)",
            )
        draw = pyro_method(_sparse if self.is_sparse else _full)
        with ExitStack() as stack:
            if not self.learn:
                stack.enter_context(_Constants())
            result: Tensor = draw(self.gp, self, X, y)
        return result

    def enter(self, stack: ExitStack, shape: tuple[int, ...], N: int) -> Tensor:
        """The plates of outputs and of rows, for arguments with N rows; the indices of the rows."""
        outputs = shape[:-1] if self.by_class else shape
        for i, n in enumerate(reversed(outputs)):
            name = self.gp._pyro_get_fullname(f"output{i}" if i else "output")
            stack.enter_context(pyro.plate(name, n, dim=-2 - i))
        full = self.gp.num_data if self.is_sparse else N
        size = N if self.batch_size is None or full > N else min(self.batch_size, N)
        rows = pyro.plate(self.gp._pyro_get_fullname("rows"), full, subsample_size=size, dim=-1)
        index: Tensor = stack.enter_context(rows)
        return index

    @torch.no_grad()
    def store(self, guide: AutoCVI) -> None:
        """Write the posterior into the Gaussian process, whose own `forward` then predicts.

        u_loc and u_scale_tril (f_loc and f_scale_tril of a full one), and the medians of parameters
        that have a prior.
        """
        gp = self.gp
        gp.set_mode("guide")
        q = guide.joint([self.site])
        name = "u" if self.is_sparse else "f"
        shape = getattr(gp, f"{name}_loc").shape
        n, many = shape[-1], shape[:-1].numel()
        every = q.covariance_matrix.reshape(many, n, many, n)
        cov = torch.stack([every[i, :, i] for i in range(many)]).reshape(*shape, n)
        loc = q.mean.reshape(shape)
        tril = torch.linalg.cholesky(cov)
        inputs = gp.Xu if self.is_sparse else gp.X
        if self.is_sparse and not gp.whiten:
            factor = pyro_method(_root)(gp, inputs)
            loc, tril = (factor @ loc.unsqueeze(-1)).squeeze(-1), factor @ tril
        elif gp.whiten and not self.is_sparse:
            factor = pyro_method(_root)(gp, inputs)
            loc = torch.linalg.solve_triangular(factor, loc.unsqueeze(-1), upper=False).squeeze(-1)
            tril = torch.linalg.solve_triangular(factor, tril, upper=False)
        getattr(gp, f"{name}_loc").copy_(loc)
        setattr(gp, f"{name}_scale_tril", tril)
        self._store_medians(guide)

    def _store_medians(self, guide: AutoCVI) -> None:
        medians = guide.median()
        for module in self.gp.modules():
            for name in getattr(module, "_guides", {}):
                setattr(module, f"{name}_map", medians[module._pyro_get_fullname(name)])


def _check_names(gp: Any) -> None:
    """Parameters of two Gaussian processes that have one name are one parameter to Pyro."""
    if pyro.settings.get("module_local_params"):
        return
    store = pyro.get_param_store()
    for leaf_name, leaf in gp.named_parameters():
        name = leaf_name.removesuffix("_unconstrained")
        name = f"{gp._pyro_name}.{name}" if gp._pyro_name else name
        if name in store and store[name].unconstrained() is not leaf:
            raise CVIError(
                f"parameter '{name}'",
                "another object has a parameter of this name, whose value it would take over",
                "names of their own for the parameters of each Gaussian process",
                "pyro.clear_param_store() if the other one is done with, or hold both in one "
                "PyroModule",
            )


class _Constants(Messenger):
    """Parameters are constants inside, and no parameters outside."""

    def _pyro_param(self, msg: Any) -> None:
        msg["stop"] = True

    def _pyro_post_param(self, msg: Any) -> None:
        msg["value"] = msg["value"].detach()


def _observed_by(likelihood: Likelihood) -> Observe:
    """The distribution of the data given f, as the likelihood makes it of a draw of f."""
    if isinstance(likelihood, Gaussian):
        return lambda f: dist.Normal(f, likelihood.variance.sqrt())
    response = getattr(likelihood, "response_function", None)
    if isinstance(likelihood, Binary):
        if response is torch.sigmoid:
            return lambda f: dist.Bernoulli(logits=f)
        return lambda f: dist.Bernoulli(likelihood.response_function(f))
    if isinstance(likelihood, MultiClass):
        if response is _softmax:
            return lambda f: dist.Categorical(logits=f)
        return lambda f: dist.Categorical(likelihood.response_function(f))
    if isinstance(likelihood, Poisson):
        return lambda f: dist.Poisson(likelihood.response_function(f))
    raise CVIError(
        "GaussianProcess",
        f"a likelihood {type(likelihood).__name__}",
        "Binary, Gaussian, MultiClass or Poisson",
        "pass observe=lambda f: ..., the distribution of the data given f",
    )


def _root(gp: Any, inputs: Tensor) -> Tensor:
    """The Cholesky factor of the kernel's matrix, with the jitter of the Gaussian process."""
    matrix = gp.kernel(inputs)
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    while gp.jitter < _MOST_JITTER:
        factor, info = torch.linalg.cholesky_ex(matrix + gp.jitter * eye)
        if not bool(info.any()):
            return factor
        gp.jitter = max(10 * gp.jitter, torch.finfo(matrix.dtype).eps)
    return torch.linalg.cholesky(matrix + gp.jitter * eye)


def _sparse(gp: Any, model: GaussianProcess, X: Tensor, y: Tensor) -> Tensor:
    gp.set_mode("model")
    gp._load_pyro_samples()
    shape = tuple(gp.latent_shape)
    factor = _root(gp, gp.Xu)
    zero = gp.Xu.new_zeros(*shape, len(gp.Xu))
    v = pyro.sample(model.site, dist.Normal(zero, 1.0).to_event(zero.dim()))
    with ExitStack() as stack:
        index = model.enter(stack, shape, len(X))
        if len(index) < len(X):
            X, y = X[index], y[..., index]
        weights = torch.linalg.solve_triangular(factor, gp.kernel(gp.Xu, X), upper=False)
        rest = (gp.kernel(X, diag=True) - weights.square().sum(0)).clamp(min=gp.jitter)
        f = v @ weights + gp.mean_function(X)
        noise = dist.Normal(X.new_zeros(len(X)), 1.0)
        if model.by_class:
            f, rest = f.transpose(-2, -1), rest.unsqueeze(-1)
            noise = dist.Normal(X.new_zeros(len(X), shape[-1]), 1.0).to_event(1)
        name = gp._pyro_get_fullname("rest")
        e = pyro.sample(name, noise, infer={"posterior": "prior"})
        f = f + rest.sqrt() * e
        pyro.sample(gp.likelihood._pyro_get_fullname("y"), model.observe(f), obs=y)
    return f


def _full(gp: Any, model: GaussianProcess, X: Tensor, y: Tensor) -> Tensor:
    gp.set_mode("model")
    gp._load_pyro_samples()
    shape = tuple(gp.latent_shape)
    factor = _root(gp, X)
    prior = dist.MultivariateNormal(X.new_zeros(*shape, len(X)), scale_tril=factor)
    f = pyro.sample(model.site, prior.to_event(len(shape)))
    f = f + gp.mean_function(X)
    with ExitStack() as stack:
        model.enter(stack, shape, len(X))
        if model.by_class:
            f = f.transpose(-2, -1)
        pyro.sample(gp.likelihood._pyro_get_fullname("y"), model.observe(f), obs=y)
    return f
