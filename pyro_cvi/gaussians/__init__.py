"""Gaussian blocks: how the scalars of their sites are laid out, and quadratic forms of them."""

from pyro_cvi.gaussians.layout import Layout as Layout
from pyro_cvi.gaussians.layout import partition as partition
from pyro_cvi.gaussians.quadratic import row_quadratic as row_quadratic
