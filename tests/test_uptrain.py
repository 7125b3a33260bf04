# SPDX-License-Identifier: Apache-2.0
"""Training of models that share K and V: its forward pass is the engine's, it learns, it goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import no_cache
import slimrt
from conftest import TESTS, decode, open_engine, relative
from no_cache import cla, mlkv
from slimrt.modelfile.gguf import read_gguf
from tiny_model import write_tiny

sys.path.insert(0, str(TESTS.parent / "training"))
pytestmark = [pytest.mark.oracle, pytest.mark.unsanitized]  # torch; the core is tested by others

IDS = np.random.default_rng(3).integers(3, 60, 60)
CONFIGS = {
    "mlkv": mlkv(2, 2),
    "mlkv-sequential": mlkv(4, 1, use_parallel_residual=False, hidden_act="gelu_new"),
    "cla": cla(2),
}


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_forward_pass_is_the_engines(name, torch, tmp_path):
    from shared_model import SharedModel

    directory = no_cache.write(tmp_path / "model", CONFIGS[name], no_cache.tensors_of(CONFIGS[name]))
    slimrt.convert(directory, tmp_path / "model.gguf", progress=False)
    with torch.no_grad():
        got = SharedModel(read_gguf(tmp_path / "model.gguf"))(torch.from_numpy(IDS)[None])[0].numpy()
    assert relative(got, decode(open_engine(tmp_path / "model.gguf", n_ctx=64), IDS, 40)) <= 1e-5


@pytest.fixture
def shared(tmp_path):
    """A small Llama with a vocabulary, merged, and a text."""
    slimrt.convert(write_tiny(tmp_path / "tiny.gguf", n_layers=4), tmp_path / "shared.gguf", kv_layers=2, kv_heads=2,
                   progress=False)  # fmt: skip
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran to the cat " * 40)
    return tmp_path


def test_it_learns_and_goes_on_where_it_stopped(torch, shared, monkeypatch):
    from uptrain import Recipe, SharedModel, Training, uptrain

    recipe = Recipe(steps=30, batch=4, length=32, lr=3e-3)
    files = {"source": shared / "shared.gguf", "text": shared / "text.txt", "recipe": recipe}
    losses = uptrain(**files, out=shared / "whole.gguf", checkpoint=shared / "whole.pt")
    assert np.mean(losses[-5:]) < 0.7 * losses[0]

    def few(self, ids):  # as a process that ends after 13 steps, and saved the tenth
        for loss in every_step(self, ids):
            if len(self.losses) > 13:
                raise KeyboardInterrupt
            yield loss

    every_step = Training.steps
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Training, "steps", few)
        uptrain(**files, out=shared / "parts.gguf", checkpoint=shared / "parts.pt", every=10)
    assert not (shared / "parts.gguf").exists()
    again = uptrain(**files, out=shared / "parts.gguf", checkpoint=shared / "parts.pt", resume=True)
    assert again == losses
    assert (shared / "parts.gguf").read_bytes() == (shared / "whole.gguf").read_bytes()
    with pytest.raises(ValueError, match="of another model, text or recipe"):
        uptrain(
            **files | {"recipe": Recipe(30, 4, 16)}, out=shared / "x.gguf", checkpoint=shared / "parts.pt", resume=True
        )
    assert SharedModel(read_gguf(shared / "whole.gguf")).owners == [0, 0, 2, 2]


def test_the_recipe_of_the_paper(torch):
    """A line up over the first fifth, then half a cosine down to nothing."""
    from uptrain import Recipe

    recipe = Recipe(steps=100, batch=1, length=1)
    rates = np.array([recipe.rate(step) for step in range(100)]) / 6e-4
    assert np.allclose(rates[:20], np.arange(1, 21) / 20) and rates[99] == 0
    assert np.allclose(rates[20:], (1 + np.cos(np.pi * np.arange(1, 81) / 80)) / 2)
    assert (recipe.betas, recipe.decay) == ((0.9, 0.95), 0.01)


def test_the_command(torch, shared):
    """What it writes is usable: nothing is said when it is loaded, as it is of what it was made from."""
    command = [sys.executable, TESTS.parent / "training" / "uptrain.py", shared / "shared.gguf", shared / "text.txt"]
    options = [
        "-o",
        shared / "out.gguf",
        "--steps",
        "5",
        "--batch",
        "2",
        "--length",
        "16",
        "--plot",
        shared / "loss.png",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "5 steps, loss" in done.stdout, done.stderr
    assert (shared / "loss.png").read_bytes().startswith(b"\x89PNG") and (shared / "out.gguf.checkpoint").exists()
    plan = slimrt.plan(shared / "out.gguf", cache="kv:f16", n_ctx=64).asked
    assert plan.bytes_per_token == slimrt.plan(shared / "shared.gguf", cache="kv:f16", n_ctx=64).asked.bytes_per_token


def test_loading_says_what_was_not_trained(torch, shared, caplog):
    from uptrain import Recipe, uptrain

    uptrain(shared / "shared.gguf", shared / "text.txt", shared / "out.gguf", Recipe(1, 1, 16), checkpoint=shared / "c")
    caplog.clear()
    slimrt.Model(shared / "out.gguf").close()
    assert "shares K and V" not in caplog.text
    slimrt.Model(shared / "shared.gguf").close()
    assert "shared.gguf shares K and V and was not trained since: it is not usable yet" in caplog.text


def test_models_that_cannot_be_trained(torch, tmp_path):
    from shared_model import SharedModel

    tiny = write_tiny(tmp_path / "tiny.gguf", stored="Q8_0")
    with pytest.raises(slimrt.UnsupportedError, match=r"is q8_0: train float weights"):
        SharedModel(read_gguf(tiny))
    with pytest.raises(slimrt.UnsupportedError, match="architecture 'olmo2' cannot be trained"):
        SharedModel(read_gguf(write_tiny(tmp_path / "olmo2.gguf", arch="olmo2")))
    with pytest.raises(ValueError, match="has 6 tokens, too few"):
        from uptrain import Recipe, uptrain

        (tmp_path / "short.txt").write_text("abcd")
        uptrain(write_tiny(tmp_path / "f.gguf"), tmp_path / "short.txt", tmp_path / "o", Recipe(1, 1, 16),
                checkpoint=tmp_path / "c")  # fmt: skip
