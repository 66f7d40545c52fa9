"""Expectations under the posterior: exact, by quadrature, and what they need."""

from pyro_cvi.estimators.expectation import KINDS as KINDS
from pyro_cvi.estimators.expectation import Expectation as Expectation
from pyro_cvi.estimators.expectation import Function as Function
from pyro_cvi.estimators.expectation import How as How
from pyro_cvi.estimators.expectation import compile_expectation as compile_expectation
from pyro_cvi.estimators.moments import Moments as Moments
from pyro_cvi.estimators.moments import Structure as Structure
