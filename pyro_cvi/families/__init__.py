"""Exponential families: T, A, both coordinate maps, Fisher solve, domain, Pyro distribution."""

from pyro_cvi.families.bernoulli import BERNOULLI as BERNOULLI
from pyro_cvi.families.bernoulli import Bernoulli as Bernoulli
from pyro_cvi.families.beta import BETA as BETA
from pyro_cvi.families.beta import Beta as Beta
from pyro_cvi.families.categorical import CATEGORICAL as CATEGORICAL
from pyro_cvi.families.categorical import Categorical as Categorical
from pyro_cvi.families.dirichlet import DIRICHLET as DIRICHLET
from pyro_cvi.families.dirichlet import Dirichlet as Dirichlet
from pyro_cvi.families.family import AbstractFamily as AbstractFamily
from pyro_cvi.families.family import Mean as Mean
from pyro_cvi.families.family import Natural as Natural
from pyro_cvi.families.family import positive_step as positive_step
from pyro_cvi.families.gamma import GAMMA as GAMMA
from pyro_cvi.families.gamma import Gamma as Gamma
from pyro_cvi.families.gaussian import GAUSSIAN as GAUSSIAN
from pyro_cvi.families.gaussian import Gaussian as Gaussian
from pyro_cvi.families.gaussian import from_loc_cov as from_loc_cov
from pyro_cvi.families.gaussian import from_loc_precision as from_loc_precision
from pyro_cvi.families.gaussian import loc_cov as loc_cov
from pyro_cvi.families.inverse_gamma import INVERSE_GAMMA as INVERSE_GAMMA
from pyro_cvi.families.inverse_gamma import InverseGamma as InverseGamma
from pyro_cvi.families.registry import family_of as family_of
from pyro_cvi.families.registry import peel as peel
from pyro_cvi.families.registry import register_family as register_family
from pyro_cvi.families.registry import registered_families as registered_families
