"""The algebra: expressions of latent sites, and the tensor that builds them."""

from pyro_cvi.algebra import rules as _rules
from pyro_cvi.algebra.expression import Expression as Expression
from pyro_cvi.algebra.expression import SiteRef as SiteRef
from pyro_cvi.algebra.expression import Statistic as Statistic
from pyro_cvi.algebra.expression import site_expression as site_expression
from pyro_cvi.algebra.latent import LatentTensor as LatentTensor
from pyro_cvi.algebra.latent import Recorder as Recorder
from pyro_cvi.algebra.latent import expression_of as expression_of
from pyro_cvi.algebra.latent import plain as plain
from pyro_cvi.algebra.latent import recording as recording
from pyro_cvi.algebra.latent import register_rewrite as register_rewrite
from pyro_cvi.algebra.latent import register_rule as register_rule

del _rules
