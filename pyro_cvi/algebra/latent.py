"""LatentTensor: a value together with the expression that made it.

An ordinary model runs on LatentTensors. Every torch function computes its value as always, and its
rule (see `rules`) computes the expression of the result; a function without a rule makes the result
opaque. What leaves torch (`.item()`, `bool()`, numpy, writes into plain tensors) is recorded by the
active `Recorder`, for no rule can follow it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.algebra.budget import Size, excess
from pyro_cvi.algebra.collect import collected
from pyro_cvi.algebra.expression import Expression, as_expression, opaque
from pyro_cvi.algebra.reason import Cause, Reason

__all__ = [
    "LatentTensor",
    "Recorder",
    "expression_of",
    "plain",
    "register_rewrite",
    "register_rule",
    "rules",
]

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}

_LEAVES_TORCH = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__contains__", "is_nonzero", "equal", "allclose", "__dlpack__",
}  # fmt: skip
_CONSTANT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "size", "dim", "numel", "stride",
    "is_floating_point", "is_complex", "get_device", "element_size", "__len__",
    "is_contiguous", "storage_offset", "__hash__", "__format__", "__repr__",
    "requires_grad_", "data_ptr", "_is_view", "is_same_size", "result_type",
}  # fmt: skip
_FRAMES = 6
"""Of the stack that are looked at, for who calls."""
SCORE_ONLY = "so that only the score function serves"
"""The end of the sentence about a site through which no pathwise gradient comes."""
_JUMPS = {
    "sign", "sgn", "round", "floor", "ceil", "trunc", "fix", "heaviside", "floor_divide", "frac",
    "fmod", "remainder", "argmax", "argmin", "argsort", "searchsorted", "bucketize", "unique",
}  # fmt: skip
_OUR_OWN = ("torch.distributions", "pyro.")
_BY_KEYWORD = ("input", "other", "mat2", "vec", "exponent")
"""Arguments that torch also takes by keyword: rules see them by position, in this order."""


class Recorder:
    """What left the algebra during one run, by site: read as a number, or written into a tensor."""

    def __init__(self) -> None:
        self.read: dict[str, str] = {}
        self.written: dict[str, str] = {}

    @contextmanager
    def written_in(self) -> Iterator[dict[str, str]]:
        """What is written inside, by site; before that, it is empty."""
        before, self.written = self.written, {}
        inside = self.written
        try:
            yield inside
        finally:
            self.written = {**before, **inside}


_active: list[Recorder] = []


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make `recorder` the one that LatentTensors report to."""
    _active.append(recorder)
    try:
        yield recorder
    finally:
        _active.pop()


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register `rule(out, *args, **kwargs) -> Expression` (or a tuple of them, or None for opaque).

    Names are torch's (`__add__` counts as `add`); `out` is the plain result, the arguments are as the
    user gave them, with LatentTensors among them.
    """

    def decorate(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return decorate


class _Rewrite:
    """The rule of a function that others compute: the expression is that of their result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.runs = function, False

    def __call__(self, out: Tensor, *args: Any, **kwargs: Any) -> Expression | None:
        if self.runs:  # it calls what it rewrites
            return None
        self.runs = True
        try:
            result = self.function(*args, **kwargs)
        finally:
            self.runs = False
        return None if result is None else expression_of(result)


def register_rewrite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `function(*args, **kwargs) -> Tensor`: a torch function by others that have rules.

    It gets the arguments as the user gave them, is ordinary torch code, and returns what the function of
    that name would, or None where it does not apply (the result is opaque then). Only the expression is
    taken from it; values stay those of torch.

    Example:
        >>> import torch
        >>> from pyro_cvi.algebra import register_rewrite
        >>> @register_rewrite("trapezoid")
        ... def trapezoid(y, x):
        ...     return 0.5 * ((y[..., 1:] + y[..., :-1]) * x.diff()).sum(-1)
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register_rule(*names)(_Rewrite(function))
        return function

    return decorate


def rules() -> Mapping[str, Rule]:
    """The registered rules by name."""
    return dict(_RULES)


class LatentTensor(torch.Tensor):
    """A torch.Tensor that carries an `Expression` of the latent sites it was computed from."""

    _expression: Expression

    @staticmethod
    def make(value: Tensor, expression: Expression) -> LatentTensor:
        result = value.as_subclass(LatentTensor)
        result._expression = expression
        return result

    @property
    def expression(self) -> Expression:
        return self._expression

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentTensor:
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        key, inplace = _canonical(name)
        before = args
        if inplace and args and not isinstance(args[0], LatentTensor):  # the rule needs what it was
            before = (plain(args[0]).clone(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*plain(args), **plain(kwargs) if kwargs else kwargs)
        if name in _LEAVES_TORCH:
            _record_read(name, args)
            return out
        if name in _CONSTANT:
            if isinstance(
                out, Tensor
            ):  # z.new_full(shape, u) keeps the number, not where it is from
                _record_read(name, (*args[1:], kwargs))
            return out
        if name == "__setitem__" and isinstance(args[0], LatentTensor):
            args[0]._expression = expression_of(_wrap("setitem", plain(args[0]), args, kwargs))
            return None
        if not _holds_tensors(out):
            if name in ("__setitem__", "__set__") and not _is_by_ordered_logistic():
                _record_write(name, args)
            return out
        if kwargs.get("out") is not None or (inplace and not isinstance(args[0], LatentTensor)):
            _record_write(name, args)
        result = _wrap(key, out, before, kwargs)
        if inplace and isinstance(args[0], LatentTensor):
            args[0]._expression = expression_of(result)
            return args[0]
        return result


def _is_by_ordered_logistic() -> bool:
    """Whether the constructor of Pyro's OrderedLogistic fills its table of probabilities.

    Its density rule reads predictor and cutpoints, and not that table.
    """
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("ordered_logistic.py"):
            return True
        frame = frame.f_back
    return False


def plain(x: Any) -> Any:
    """The same structure with every LatentTensor replaced by its plain value."""
    kind = type(x)
    if kind is LatentTensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor)
    if kind is tuple:
        return tuple([plain(v) for v in x])
    if kind is list:
        return [plain(v) for v in x]
    if kind is dict:
        return {k: plain(v) for k, v in x.items()}
    return x


def expression_of(x: Any) -> Expression:
    """The expression of a LatentTensor; a plain tensor or number is a constant."""
    if isinstance(x, LatentTensor):
        return x._expression
    return as_expression(x if isinstance(x, Tensor) else float(x))


def hidden(x: Tensor, reason: str) -> Tensor:
    """The same value, of which the algebra knows no more than the sites; a plain tensor as it is."""
    if not isinstance(x, LatentTensor):
        return x
    return LatentTensor.make(
        plain(x), opaque(x.expression.sites, Reason(reason), x.expression.shape)
    )


def latents_in(x: Any) -> Iterator[LatentTensor]:
    """Every LatentTensor in a nest of tuples, lists and dicts."""
    if isinstance(x, LatentTensor):
        yield x
    elif isinstance(x, tuple | list):
        for v in x:
            yield from latents_in(v)
    elif isinstance(x, dict):
        for v in x.values():
            yield from latents_in(v)


_SAME = {"truediv": "div", "rtruediv": "rdiv", "radd": "add", "rmul": "mul", "pos": "positive"}


def _holds_tensors(out: Any) -> bool:
    return isinstance(out, Tensor) or (
        isinstance(out, tuple | list) and any(isinstance(t, Tensor) for t in out)
    )


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(func, "__self__", None)
        return "property_" + getattr(owner, "__name__", "")
    return name


def _canonical(name: str) -> tuple[str, bool]:
    """'__iadd__', 'add_' -> ('add', True); '__radd__' -> ('radd', False)."""
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in ("iadd", "isub", "imul", "itruediv", "idiv", "ipow", "imatmul"):
            return {"itruediv": "div", "idiv": "div"}.get(bare, bare[1:]), True
        return _SAME.get(bare, bare), False
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, False


def _wrap(key: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = _RULES.get(key)
    if kwargs.get("out", 0) is None:
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    named = [k for k in _BY_KEYWORD if k in kwargs]
    if named:
        args = (*args, *(kwargs[k] for k in named))
        kwargs = {k: v for k, v in kwargs.items() if k not in named}
    tensors = (out,) if isinstance(out, Tensor) else tuple(out)
    inputs = list(latents_in((*args, kwargs) if kwargs else args))
    why = None
    if isinstance(out, Tensor) or len(inputs) == 1:  # else each result has its own argument
        why = _hides_all(inputs) or _excess([v._expression.size for v in inputs])
    expressions: Any = None
    if rule is not None and why is None and all(isinstance(t, Tensor) for t in tensors):
        expressions = _by_rule(rule, out, args, kwargs)
    if expressions is None:
        sites = frozenset().union(*(v._expression.sites for v in inputs))
        known = why if rule is not None else None
        expressions = tuple(
            opaque(sites, _opaque_reason(key, inputs, t, known), tuple(t.shape))
            if isinstance(t, Tensor)
            else None
            for t in tensors
        )
        if isinstance(out, Tensor):
            expressions = expressions[0]
    if isinstance(out, Tensor):
        return _attach(out, expressions)
    wrapped = [_attach(t, e) for t, e in zip(out, expressions, strict=True)]
    return out if not isinstance(out, tuple | list) else _rebuild(out, wrapped)


def _by_rule(rule: Rule, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The expressions that a rule finds; None for an unusual call form, whose value is right."""
    if not _is_real(out):
        return None
    symbols = isinstance(rule, _Rewrite)
    try:
        with nullcontext() if symbols else torch._C.DisableTorchFunctionSubclass():
            return rule(out, *args, **kwargs)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError):
        return None


def _hides_all(inputs: list[LatentTensor]) -> Reason | None:
    """Why no rule could tell more than the sites: all of these are in opaque parts of the inputs.

    A factor that reads them is sampled for all of them, whatever else it reads of them.
    """
    parts = [o for v in inputs for o in v._expression.opaque]
    if not parts:
        return None
    names = frozenset().union(*(o.names for o in parts))
    return parts[0].reason if all(v._expression.sites <= names for v in inputs) else None


def _opaque_reason(
    key: str, inputs: list[LatentTensor], result: Tensor, known: Reason | None
) -> Reason:
    """Why a result is opaque; what jumps, or comes from something that does, has no gradient.

    Of an operation that has a rule, its inputs are the reason, `known`.
    """
    label = key.removeprefix("property_")
    for v in inputs:
        for part in v._expression.opaque:
            if part.reason.cause is Cause.NO_GRADIENT:
                return part.reason
    if key in _JUMPS or not (result.dtype.is_floating_point or result.dtype.is_complex):
        return Reason(f"'{label}' is constant in steps, {SCORE_ONLY}", Cause.NO_GRADIENT)
    return known or Reason(f"'{label}' has no rule")


def _rebuild(out: Any, wrapped: list[Any]) -> Any:
    if isinstance(out, list):
        return wrapped
    if type(out) is tuple:
        return tuple(wrapped)
    try:
        return type(out)(wrapped)  # torch.return_types
    except TypeError:
        return tuple(wrapped)


def _excess(sizes: Sequence[Size]) -> Reason | None:
    found = excess(sizes)
    return None if found is None else Reason(found)


def _is_real(out: Any) -> bool:
    """Rules speak of real values; an op of several results may return others beside them."""
    return not isinstance(out, Tensor) or out.dtype.is_floating_point


def _attach(t: Any, e: Expression | None) -> Any:
    if not isinstance(t, Tensor) or e is None:
        return t
    if not e.sites:  # known to be constant: 1 for the sum of a simplex, and not 1 to rounding
        number = not isinstance(e.constant, Tensor) and not e.terms
        return torch.full_like(t, float(e.constant)) if number else t
    e = collected(e, t)
    why = Reason("a rule gave a wrong shape") if tuple(t.shape) != e.shape else _excess([e.size])
    if why is not None:
        e = opaque(e.sites, why, tuple(t.shape))
    return LatentTensor.make(t, e)


def _record_read(name: str, args: tuple[Any, ...]) -> None:
    if not _active:
        return
    frame = sys._getframe(2)
    for _ in range(4):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OUR_OWN):
            return  # a support or shape check of the library, whose outcome does not enter the model
        if module.startswith("pyro_cvi") or module.startswith("torch"):
            if frame.f_back is None:
                break
            frame = frame.f_back
            continue
        break
    for t in latents_in(args):
        for site in t._expression.sites:
            _active[-1].read[site] = name


def _record_write(name: str, args: tuple[Any, ...]) -> None:
    if _active:
        for t in latents_in(args):
            for site in t._expression.sites:
                _active[-1].written[site] = name
