"""Scaling laws: the fit of tools/scaling_law.py, the file it writes, and what a law says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from llmq.base.errors import ConfigError, LlmqError
from llmq.plan.law import OTHER_TEXT, PUBLISHED, Constants, read_laws, worth
from tools.scaling_law import fit, fit_files, law_record

TRUE = Constants(1.7, 400.0, 900.0, 0.36, 0.33)
SIZES, BUDGETS = (1.5e6, 3e6, 6e6, 14e6, 30e6), (16e6, 50e6, 150e6)


def runs(noise: float = 0.0) -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {
            "parameters": n,
            "tokens": d,
            "unique": math.inf,
            "loss": TRUE.loss(n, d) * (1 + noise * rng.standard_normal()),
            "optimizer": "adamw",
        }
        for n in SIZES
        for d in BUDGETS
    ]


def arrays(of: list[dict]) -> list[np.ndarray]:
    return [np.array([run[name] for run in of]) for name in ("parameters", "tokens", "loss")]


def test_the_fit_finds_the_constants_of_exact_runs():
    found = fit(*arrays(runs()))
    # The grid of exponents ends a thousandth of its first step apart.
    np.testing.assert_allclose([found.E, found.alpha, found.beta], [1.7, 0.36, 0.33], rtol=0.01)
    for run in runs():
        assert math.isclose(found.loss(run["parameters"], run["tokens"]), run["loss"], rel_tol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A law that was fitted to noisy runs, as law.json, with its picture."""
    folder = tmp_path_factory.mktemp("law")
    report = {"device": "a card", "tokenizer": "abc", "runs": runs(noise=0.003)}
    (folder / "runs.json").write_text(json.dumps(report))
    fit_files([folder / "runs.json"], folder / "law.json", "texts", folder / "law.png")
    return folder


def test_noise_is_what_runs_are_off_by_and_grows_with_the_distance(folder):
    record = json.loads((folder / "law.json").read_text())["optimizers"]["adamw"]
    assert 0.001 < record["off"] < 0.02
    assert len(record["largest_by_others"]) == 3
    near, far = (
        np.std([Constants(*each).loss(n, d) for each in record["constants"]])
        for n, d in ((6e6, 50e6), (1e9, 2e10))
    )
    assert far > 2 * near


def test_runs_that_no_positive_constants_describe_are_refused():
    of = runs()
    for run in of:
        run["loss"] = 10 - run["loss"]  # rises with size and tokens
    with pytest.raises(LlmqError, match="no positive constants"):
        fit(*arrays(of))
    with pytest.raises(LlmqError, match="too few"):
        law_record(runs()[:7])


def test_a_fitted_file_is_read_as_laws(folder):
    assert (folder / "law.png").stat().st_size > 5000
    law = read_laws(folder / "law.json")["adamw"]
    assert (law.parameters, law.tokens) == ((1.5e6, 30e6), (16e6, 150e6))
    assert "15 runs of this program on texts (a card)" in law.source
    assert law.beyond(3e6, 1.5e9) == 10 and law.beyond(3e6, 16e6) == 1
    assert 2 * law.off <= law.error(6e6, 50e6, "abc") < law.error(1e9, 2e10, "abc")
    assert law.error(6e6, 50e6, "another tokenizer") == law.error(6e6, 50e6, None) == OTHER_TEXT


def test_other_files_are_no_laws(tmp_path):
    for text in ("{}", "[]", "no JSON", '{"layout": "llmq scaling law"}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=r"--law: '.*x\.json' is not of tools/scaling_law"):
            read_laws(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read_laws(tmp_path / "none.json")


def test_the_published_law_says_what_its_paper_does():
    """About 20 tokens for each parameter at Chinchilla's budget."""
    assert 15 < 1.4e12 / PUBLISHED.constants.size_for(1.4e12) < 30
    assert PUBLISHED.error(70e9, 1.4e12, None) == OTHER_TEXT


def test_the_size_for_some_tokens_has_the_lowest_loss_of_its_computation():
    tokens = 1e9
    size = TRUE.size_for(tokens)
    best = TRUE.loss(size, tokens)
    assert all(TRUE.loss(size * by, tokens / by) > best for by in (0.8, 0.95, 1.05, 1.25))


def test_further_passes_teach_less():
    law = PUBLISHED
    once, twice, often = (law.loss(1e8, passes * 1e9, 1e9) for passes in (1, 2, 1000))
    assert once == law.loss(1e8, 1e9) > twice > often
    assert law.loss(1e8, 2e9) < twice and often > law.loss(1e8, 16.5e9)
    assert worth(5, 10, 3.0) == 5 and worth(1e9, 10, 3.0) == 40
