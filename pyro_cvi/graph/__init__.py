"""From a Pyro model to a plan: the only reader of Pyro's traces."""

from pyro_cvi.graph.evaluator import Evaluator as Evaluator
from pyro_cvi.graph.plan import Block as Block
from pyro_cvi.graph.plan import CompiledFactor as CompiledFactor
from pyro_cvi.graph.plan import Plan as Plan
