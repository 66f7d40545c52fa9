"""Make `nuts_mixed.csv`: the three models of tutorial 07 by NUTS, which the tutorial compares with.

Needs numpyro (`pip install '.[bench]'`), which the tutorial itself does not. From this folder:

    python make_nuts_mixed.py
"""

import csv
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
CHAINS, WARMUP, DRAWS = 4, 1000, 2500


def load(name):
    with np.load(HERE / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key].astype(float) for key in file}


def effects(name, size, log_sd):
    """Effects of one grouping; standardised, which NUTS prefers."""
    with numpyro.plate(f"{name}s", size):
        z = numpyro.sample(f"{name}_z", dist.Normal(0.0, 1.0))
    return numpyro.deterministic(name, jnp.exp(log_sd) * z)


def cattle(X, herd, size, y):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    numpyro.deterministic("log_sd", jnp.log(sd))
    b = numpyro.sample("b", dist.Normal(0.0, 2.5).expand([4]).to_event(1))
    u = effects("u", 15, jnp.log(sd))
    new = numpyro.sample("new_z", dist.Normal(0.0, 1.0))
    numpyro.deterministic("new_herd", b[0] + sd * new)  # the logit in the first period
    numpyro.sample("y", dist.Binomial(size, logits=X @ b + u[herd]), obs=y)


def seizures(X, subject, y):
    log_sd_u = numpyro.sample("log_sd_u", dist.Normal(-1.0, 1.0))
    log_sd_v = numpyro.sample("log_sd_v", dist.Normal(-1.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 2.5).expand([6]).to_event(1))
    u, v = effects("u", 59, log_sd_u), effects("v", 236, log_sd_v)
    numpyro.sample("y", dist.Poisson(jnp.exp(X @ b + u[subject] + v)), obs=y)


def votes(X, at, region, v_prev, size, y):
    names = ("age", "edu", "cell", "state", "region")
    log_sd = {k: numpyro.sample(f"log_sd_{k}", dist.Normal(-1.0, 1.0)) for k in names}
    b = numpyro.sample("b", dist.Normal(0.0, 2.5).expand([4]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    sizes = {"age": 4, "edu": 4, "cell": 16, "region": 5}
    u = {k: effects(k, n, log_sd[k]) for k, n in sizes.items()}
    with numpyro.plate("states", 51):
        z = numpyro.sample("state_z", dist.Normal(0.0, 1.0))
    state = u["region"][region] + slope * v_prev + jnp.exp(log_sd["state"]) * z
    u["state"] = numpyro.deterministic("state", state)
    eta = X @ b + sum(u[k][at[k]] for k in ("age", "edu", "cell", "state"))
    numpyro.sample("y", dist.Binomial(size, logits=eta), obs=y)
    expected = jnp.zeros(51).at[at["state"]].add(size * jax.nn.sigmoid(eta))
    polled = jnp.zeros(51).at[at["state"]].add(size)
    numpyro.deterministic("share", (expected / polled)[np.unique(at["state"])])


def cattle_data():
    d = load("cbpp")
    X = np.stack([np.ones(56), *(d["period"] == p for p in (2, 3, 4))], 1)
    return X, d["herd"].astype(int) - 1, d["size"], d["incidence"]


def seizure_data():
    d = load("epil")
    base, age = np.log(d["base"] / 4), np.log(d["age"])
    X = np.stack([base, d["trt"], base * d["trt"], age, d["V4"]], 1)
    X = np.concatenate([np.ones((236, 1)), X - X.mean(0)], 1)
    return X, d["subject"].astype(int) - 1, d["y"]


def vote_data():
    """People who are alike in all that the model knows, counted together."""
    d = load("election88")
    state = d["state"].astype(int) - 1
    region, v_prev = np.zeros(51, int), np.zeros(51)
    region[state], v_prev[state] = d["region_full"].astype(int) - 1, d["v_prev_full"] - 0.5
    names = ("female", "black", "age", "edu", "age_edu", "state")
    rows = np.stack([d[k].astype(int) for k in names], 1)
    rows, which = np.unique(rows, axis=0, return_inverse=True)
    female, black, age, edu, cell, state = rows.T
    size, y = np.bincount(which.ravel()), np.bincount(which.ravel(), d["y"])
    X = np.stack([np.ones(len(rows)), female, black, female * black], 1)
    at = {"age": age - 1, "edu": edu - 1, "cell": cell - 1, "state": state - 1}
    return X, at, region, v_prev, size, y


def main():
    numpyro.enable_x64()
    table = []
    models = {
        "cattle": (cattle, cattle_data()),
        "seizures": (seizures, seizure_data()),
        "votes": (votes, vote_data()),
    }
    for title, (model, data) in models.items():
        mcmc = MCMC(
            NUTS(model, target_accept_prob=0.99),
            num_warmup=WARMUP,
            num_samples=DRAWS,
            num_chains=CHAINS,
            chain_method="sequential",
            progress_bar=False,
        )
        start = time.perf_counter()
        mcmc.run(jax.random.PRNGKey(0), *data)
        draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
        draws = {k: v for k, v in draws.items() if not k.endswith("_z")}
        r_hat = max(split_gelman_rubin(v).max() for v in draws.values())
        effective = min(effective_sample_size(v).min() for v in draws.values())
        divergences = int(np.asarray(mcmc.get_extra_fields()["diverging"]).sum())
        print(
            f"{title}: {time.perf_counter() - start:.0f} s, {divergences} divergences, "
            f"R-hat at most {r_hat:.4f}, at least {effective:.0f} effective draws",
            flush=True,
        )
        for name, values in draws.items():
            flat = values.reshape(CHAINS * DRAWS, -1)
            for i, column in enumerate(flat.T):
                numbers = [column.mean(), column.std(), *np.quantile(column, [0.05, 0.95])]
                table.append([title, name, i, *(f"{x:.5g}" for x in numbers)])
    with (HERE / "nuts_mixed.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "site", "index", "mean", "sd", "q05", "q95"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
