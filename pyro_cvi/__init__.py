"""Conjugate-computation variational inference for Pyro (Khan & Lin, 2017)."""

from pyro_cvi.densities import density as density
from pyro_cvi.errors import CVIError as CVIError
from pyro_cvi.errors import CVIWarning as CVIWarning
from pyro_cvi.explain import Report as Report
from pyro_cvi.explain import explain as explain
from pyro_cvi.families import AbstractFamily as AbstractFamily
from pyro_cvi.families import register_family as register_family
from pyro_cvi.guide import AutoCVI as AutoCVI
from pyro_cvi.hybrid import HybridGuide as HybridGuide
from pyro_cvi.infer import CVI as CVI
from pyro_cvi.infer import RunResult as RunResult
from pyro_cvi.integrate import IntegratedPosterior as IntegratedPosterior
from pyro_cvi.integrate import integrate as integrate
from pyro_cvi.recognition import Recognition as Recognition
from pyro_cvi.streaming import posterior_as_prior as posterior_as_prior

__version__ = "0.1.0"
