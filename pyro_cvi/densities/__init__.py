"""Density rules: log p of each distribution as torch code over latents."""

from pyro_cvi.densities import continuous as _continuous
from pyro_cvi.densities import discrete as _discrete
from pyro_cvi.densities.identity import constant_law as constant_law
from pyro_cvi.densities.identity import digest as digest
from pyro_cvi.densities.identity import law as law
from pyro_cvi.densities.registry import density as density
from pyro_cvi.densities.registry import is_probs as is_probs
from pyro_cvi.densities.registry import log_density as log_density
from pyro_cvi.densities.registry import plain_log_prob as plain_log_prob
from pyro_cvi.densities.registry import registered_densities as registered_densities
from pyro_cvi.densities.registry import sites_inside as sites_inside
from pyro_cvi.densities.registry import unexpanded as unexpanded

del _continuous, _discrete
