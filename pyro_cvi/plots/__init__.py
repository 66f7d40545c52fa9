"""Pictures: the bound of a run, posterior marginals, and the report as a graph. Needs matplotlib.

Install it by `pip install 'pyro_cvi[plots]'`. Every function draws into `ax` where that is given, else
into a new figure, and returns the axes; nothing is shown or saved.
"""

from pyro_cvi.plots.arrows import report as report
from pyro_cvi.plots.marginal import marginals as marginals
from pyro_cvi.plots.runs import bound as bound
