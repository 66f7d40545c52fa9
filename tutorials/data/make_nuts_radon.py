"""Make `radon_nuts.npz`: the radon model of tutorial 03 by NUTS, which the tutorial compares with.

Needs numpyro (`pip install '.[bench]'`), which the tutorial itself does not. From this folder:

    python make_nuts_radon.py
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

HERE = Path(__file__).resolve().parent
CHAINS, WARMUP, DRAWS = 4, 2000, 5000
PRECISIONS = ("tau_a", "tau_b", "tau")
REGRESSION = ("alpha0", "alpha1", "beta0", "beta1")


def model(uranium, floor, county, y):
    """The model of the tutorial; the effects are standardised, which NUTS prefers."""
    tau_a = numpyro.sample("tau_a", dist.Gamma(1.0, 0.05))
    tau_b = numpyro.sample("tau_b", dist.Gamma(1.0, 0.05))
    tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
    alpha0, alpha1, beta0, beta1 = (numpyro.sample(k, dist.Normal(0.0, 5.0)) for k in REGRESSION)
    with numpyro.plate("counties", len(uranium)):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
    a = numpyro.deterministic("a", alpha0 + alpha1 * uranium + e / jnp.sqrt(tau_a))
    b = numpyro.deterministic("b", beta0 + beta1 * uranium + f / jnp.sqrt(tau_b))
    with numpyro.plate("homes", len(y)):
        mean = a[county] + b[county] * floor
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(tau)), obs=y)


def main():
    numpyro.enable_x64()
    with np.load(HERE / "radon_mn.npz", allow_pickle=False) as file:
        y, floor, log_uranium = (file[k] for k in ("log_radon", "floor", "log_uranium"))
        county = file["county"].astype(int) - 1
    uranium = np.zeros(county.max() + 1)
    uranium[county] = log_uranium
    kernel = NUTS(model, target_accept_prob=0.95)
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(jax.random.PRNGKey(0), uranium, floor.astype(float), county, y)
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    seconds = time.perf_counter() - start

    kept, edges, result = ("a", "b", *REGRESSION, *PRECISIONS), np.linspace(0, 0.8, 81), {}
    for name in kept:
        flat = draws[name].reshape(-1, *draws[name].shape[2:])
        result[f"{name}_mean"], result[f"{name}_sd"] = flat.mean(0), flat.std(0)
    for name in PRECISIONS[:2]:  # density of the standard deviations of the counties
        result[f"{name}_histogram"], _ = np.histogram(draws[name] ** -0.5, edges, density=True)
    result["edges"] = edges
    result["max_r_hat"] = max(split_gelman_rubin(draws[name]).max() for name in kept)
    result["min_effective"] = min(effective_sample_size(draws[name]).min() for name in kept)
    np.savez_compressed(HERE / "radon_nuts.npz", **result)
    divergences = int(np.asarray(mcmc.get_extra_fields()["diverging"]).sum())
    print(f"{seconds:.0f} s, {divergences} divergences, largest R-hat {result['max_r_hat']:.4f}")
    print(f"smallest effective number of draws {result['min_effective']:.0f}")


if __name__ == "__main__":
    main()
