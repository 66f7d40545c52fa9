"""Pictures say what the fit says: heights of curves, numbers of arrows, and axes that are given."""

import itertools
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, CVIError, Report, RunResult, explain, integrate, plots

matplotlib = pytest.importorskip(
    "matplotlib", reason="pictures need matplotlib: pip install 'pyro_cvi[plots]'"
)
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def no_figures_left() -> None:
    yield
    plt.close("all")


def model(y, t):
    sd = pyro.sample("sd", dist.HalfCauchy(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("groups", 12):
        pyro.sample("u", dist.Normal(0.0, sd))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(w))
        pyro.sample("y", dist.Normal(slope * t + 0.0 * b[1], 0.5), obs=y)
        pyro.sample("c", dist.Bernoulli(torch.tensor([0.1, 0.5, 0.9])[z]), obs=(y > 0).to(y))


@pytest.fixture
def cvi() -> CVI:
    t = torch.linspace(-1.0, 1.0, 10)
    cvi = CVI(model, AutoCVI(model))
    cvi.run(t + 0.1 * torch.randn(10), t, num_steps=4)
    return cvi


# --- the bound -------------------------------------------------------------------------------------


def test_the_bound_is_drawn_step_by_step():
    (line,) = plots.bound([3.0, 2.0, 1.5]).lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == [3.0, 2.0, 1.5]


def test_the_bound_is_drawn_against_the_times_of_a_result():
    result = RunResult(losses=[3.0, 2.0], times=[0.1, 0.4])
    ax = plots.bound(result, against="seconds")
    assert ax.lines[0].get_xdata().tolist() == [0.1, 0.4]
    assert ax.get_xlabel() == "seconds"


def test_distances_are_to_the_smallest_last_loss_of_all_runs():
    ax = plots.bound({"a": [5.0, 2.0], "b": [4.0, 1.0]}, distance=True)
    first, second = (line.get_ydata() for line in ax.lines)
    assert first.tolist() == [4.0, 1.0]
    assert second[0] == 3.0
    assert second[1] != second[1]  # nothing is left, which a logarithm cannot show
    assert ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]


def test_what_cannot_be_drawn_of_a_run_is_an_error():
    with pytest.raises(CVIError, match="0 times"):
        plots.bound([1.0, 2.0], against="seconds")
    with pytest.raises(CVIError, match="no losses"):
        plots.bound({"empty": []})
    with pytest.raises(CVIError, match="no runs"):
        plots.bound({})
    with pytest.raises(CVIError, match="'steps' or 'seconds'"):
        plots.bound([1.0], against="epochs")


# --- marginals -------------------------------------------------------------------------------------


def test_a_density_is_that_of_the_law_and_integrates_to_one(cvi):
    slope, sd = plots.marginals(cvi.guide, ["slope", "sd"])
    for ax, site in ((slope, "slope"), (sd, "sd")):
        x, p = (torch.as_tensor(v) for v in ax.lines[0].get_data())
        torch.testing.assert_close(p, cvi.guide.posterior(site).log_prob(x).exp())
        # The curve ends at the quantiles 0.001 and 0.999 of draws.
        assert 0.99 < torch.trapezoid(p, x) < 1.0


def test_each_element_of_a_vector_has_its_own_marginal(cvi):
    (ax,) = plots.marginals(cvi.guide, "b")
    law = cvi.guide.posterior("b")
    assert len(ax.lines) == 3
    for k, line in enumerate(ax.lines):
        x, p = (torch.as_tensor(v) for v in line.get_data())
        own = dist.Normal(law.mean[k], law.stddev[k])
        torch.testing.assert_close(p, own.log_prob(x).exp())
    (ax,) = plots.marginals(cvi.guide, "w")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["[0]", "[1]", "[2]"]
    a = cvi.guide.posterior("w").concentration
    x, p = (torch.as_tensor(v) for v in ax.lines[0].get_data())
    torch.testing.assert_close(p, dist.Beta(a[0], a[1] + a[2]).log_prob(x).exp())


def test_a_mixture_of_fits_has_the_mixture_of_their_densities(cvi):
    t = torch.linspace(-1.0, 1.0, 10)
    posterior = integrate(cvi, "sd", t, t)
    for site in ("sd", "slope"):
        (ax,) = plots.marginals(posterior, site)
        x, p = (torch.as_tensor(v) for v in ax.lines[0].get_data())
        torch.testing.assert_close(p, posterior.posterior(site).log_prob(x).exp())


def test_discrete_sites_are_bars_that_fill_the_height(cvi):
    (ax,) = plots.marginals(cvi.guide, "z")
    p = cvi.guide.posterior("z").probs
    heights = torch.tensor([bar.get_height() for bar in ax.patches]).reshape(3, 10)
    torch.testing.assert_close(heights.T, p)


def test_large_sites_are_intervals_and_larger_ones_an_error(cvi):
    (ax,) = plots.marginals(cvi.guide, "u")
    assert len(ax.lines[0].get_xdata()) == 12
    names = [ax.get_title() for ax in plots.marginals(cvi.guide)]
    assert names == ["sd", "slope", "b", "w"]  # without names, those of at most eight scalars

    def many():
        pyro.sample("x", dist.Normal(torch.zeros(201), 1.0).to_event(1))

    wide = CVI(many, AutoCVI(many))
    wide.step()
    with pytest.raises(CVIError, match="201 scalars"):
        plots.marginals(wide.guide, "x")
    with pytest.raises(CVIError, match="no site to draw"):
        plots.marginals(wide.guide)


def test_a_prior_is_a_law_or_draws(cvi):
    (law,) = plots.marginals(cvi.guide, "slope", prior={"slope": dist.Normal(0.0, 2.0)})
    x, p = (torch.as_tensor(v) for v in law.lines[0].get_data())
    torch.testing.assert_close(p, dist.Normal(0.0, 2.0).log_prob(x).exp())
    draws = torch.randn(2000)
    (ax,) = plots.marginals(cvi.guide, "slope", prior={"slope": draws})
    low, high = (v.item() for v in (x.min(), x.max()))
    heights, edges, _ = ax.patches[0].get_data()
    inside = ((draws >= low) & (draws <= high)).double().mean()
    area = (torch.as_tensor(heights) * torch.as_tensor(edges).diff()).sum()
    torch.testing.assert_close(area, inside)


def test_axes_are_used_where_they_are_given_and_draws_leave_no_trace(cvi):
    _, grid = plt.subplots(1, 2)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert plots.marginals(cvi.guide, ["sd", "b"], ax=grid) == list(grid)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(CVIError, match="2 axes for 1 sites"):
        plots.marginals(cvi.guide, "sd", ax=grid)
    with pytest.raises(CVIError, match="no such latent"):
        plots.marginals(cvi.guide, "nothing")
    with pytest.raises(CVIError, match="expected|Expected"):
        plots.marginals(model)


# --- the report ------------------------------------------------------------------------------------


def arrows(ax) -> list:
    return [p for p in ax.patches if isinstance(p, matplotlib.patches.FancyArrowPatch)]


def test_every_message_is_an_arrow_in_the_colour_of_its_kind(cvi):
    ax = plots.report(cvi)
    edges = cvi.explain().edges
    assert len(arrows(ax)) == len(edges)
    kinds = {t.get_text() for t in ax.get_legend().get_texts()}
    assert kinds == {e.how for e in edges}
    colours = {matplotlib.colors.to_hex(p.get_edgecolor()) for p in arrows(ax)}
    assert len(colours) == len(kinds)
    texts = {t.get_text() for t in ax.texts}
    assert {s for b in cvi.explain().blocks for s in b.sites} <= texts


def test_nodes_do_not_overlap_in_a_model_of_many_messages():
    def factors(y):
        c = [pyro.sample(f"c{n}", dist.Normal(0.0, 1.0)) for n in "abcdef"]
        for i, (p, q) in enumerate(itertools.combinations(c, 2)):
            pyro.sample(f"y{i}", dist.Normal(p + q, 1.0), obs=y[i])

    report = explain(factors, torch.randn(15))
    assert 30 <= len(report.edges) <= 40
    ax = plots.report(report)
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.texts]
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    legend = ax.get_legend().get_window_extent()
    assert not any(legend.overlaps(b) for b in boxes)


def test_statements_of_a_loop_are_one_node():
    def loop(y):
        for i in range(30):
            z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    ax = plots.report(explain(loop, torch.randn(30)))
    assert len(arrows(ax)) == 2
    assert "z_# (30)" in {t.get_text() for t in ax.texts}


def test_a_report_is_a_table_in_a_notebook_and_data_elsewhere(cvi):
    report = cvi.explain()
    page = report._repr_html_()
    assert page.count("<tr>") == len(report.edges) + len(report.blocks) + 2
    assert "quadrature" in page
    assert {e.site for e in report.edges} == {s for b in report.blocks for s in b.sites}
    with pytest.raises(CVIError, match="a Report or a CVI"):
        plots.report("cvi")
    assert plots.report(Report((), ())).get_title() == "0 messages: none"


# --- without matplotlib ----------------------------------------------------------------------------


def test_the_error_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pyro_cvi\[plots\]"):
        plots.bound([1.0])
