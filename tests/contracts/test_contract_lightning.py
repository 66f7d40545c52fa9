"""`CVI.step` in Lightning's loop: the fit of a loop by hand, kept and resumed by its checkpoints."""

import copy
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.utils.data import DataLoader, TensorDataset

from pyro_cvi import CVI, AutoCVI, HybridGuide

lightning = pytest.importorskip("pytorch_lightning")

N, BATCH = 60, 20
# The module may validate, and not every trainer asks it to; two of them share a folder.
pytestmark = pytest.mark.filterwarnings("ignore:.*(no `val_dataloader`|exists and is not empty)")


class VAE(lightning.LightningModule):
    """Codes by an encoder; their mean and the noise by CVI."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder = torch.nn.Linear(3, 4), torch.nn.Linear(2, 3)
        self.guide = HybridGuide(self.model)
        self.guide.append(AutoCVI(poutine.block(self.model, hide=["z"])))
        self.guide.append(self.encode)
        self.cvi = CVI(self.model, self.guide, pyro.optim.Adam({"lr": 0.01}))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", N, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0).to_event(1))
            law = dist.Normal(self.decoder(z), tau.rsqrt())
            pyro.sample("x", law.to_event(1), obs=x)

    def encode(self, x):
        pyro.module("encoder", self.encoder)
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("rows", N, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch, _):
        self.log("loss", self.cvi.step(*batch))
        self.optimizers().step()

    def validation_step(self, batch, _):
        self.log("held out", self.cvi.evaluate_loss(*batch))

    def predict_step(self, batch, _):
        return self.guide(*batch)["z"]

    def on_save_checkpoint(self, checkpoint):
        file = io.BytesIO()
        self.cvi.save(file)
        checkpoint["cvi"] = file.getvalue()

    def on_load_checkpoint(self, checkpoint):
        self.cvi.load(io.BytesIO(checkpoint["cvi"]))


def fresh(seed=1):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    return VAE()


def rows():
    return DataLoader(TensorDataset(X), batch_size=BATCH, shuffle=True)


X = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trainer(folder, epochs):
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], v) for n, v in b.items())


def by_hand(epochs):
    module = fresh()
    for _ in range(epochs):
        for batch in rows():
            module.cvi.step(*batch)
    return module.state_dict()


def test_lightnings_loop_is_a_loop_by_hand_and_goes_on_from_its_checkpoint(tmp_path):
    """To the last bit: networks and posterior; also where another fit has used the store before."""
    module, first = fresh(), trainer(tmp_path, 2)
    first.fit(module, rows())
    assert first.global_step == 2 * len(rows())
    assert same(module.state_dict(), by_hand(2))
    path = first.checkpoint_callback.best_model_path
    resumed, second = fresh(77), trainer(tmp_path, 4)
    second.fit(resumed, rows(), ckpt_path=path)
    assert second.global_step == 4 * len(rows())
    assert same(resumed.state_dict(), by_hand(4))


def test_validation_and_prediction_leave_the_fit_alone(tmp_path):
    """Both are in torch's inference mode; validation comes before the first step, too."""
    module, loop = fresh(), trainer(tmp_path, 2)
    held_out = DataLoader(TensorDataset(X[:20] + 0.1), batch_size=10)
    loop.fit(module, rows(), held_out)
    before = copy.deepcopy(module.state_dict())
    pyro.set_rng_seed(2)
    (found,) = loop.validate(module, held_out, verbose=False)
    pyro.set_rng_seed(2)
    by_hand = [module.cvi.evaluate_loss(*batch) for batch in held_out]
    assert found["held out"] == pytest.approx(sum(by_hand) / 2, rel=1e-6)  # logged in float32
    draws = torch.cat(loop.predict(module, held_out))
    assert draws.shape == (20, 2) and draws.unique().numel() == 40
    assert same(module.state_dict(), before)
    module.cvi.step(X[:BATCH])
    assert not same(module.state_dict(), before)


def test_a_checkpoint_answers_before_it_has_seen_data(tmp_path):
    module, loop = fresh(), trainer(tmp_path, 1)
    loop.fit(module, rows())
    pyro.clear_param_store()
    path = loop.checkpoint_callback.best_model_path
    loaded = VAE.load_from_checkpoint(path, weights_only=True)
    for site in ("mu", "tau"):
        q, known = (m.guide[0].posterior(site) for m in (loaded, module))
        assert torch.equal(q.mean, known.mean) and torch.equal(q.variance, known.variance)
    loaded.guide(X[:5])  # the first call draws numbers more, to see the model
    draws = []
    for m in (module, loaded):
        pyro.set_rng_seed(3)
        draws.append(m.guide(X[:5]))
    assert same(*draws)
