# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden: the tiny models as Hugging Face directories and what Hugging Face computes with them; and
tests/golden_seq2seq: of encoder-decoders the same without their weights, which come from a seed.

python tests/make_goldens.py [NAME ...]        # needs the extra `oracle`; deterministic
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import chronos2_models
import hf_models
import seq2seq_models

GOLDEN = Path(__file__).parent / "golden"


def main(names: list[str]) -> None:
    for name in names or [*hf_models.MODELS, *seq2seq_models.MODELS, "chronos_bolt", "chronos2"]:
        if name not in hf_models.MODELS:
            seq2seq(name)
            continue
        directory = GOLDEN / name
        shutil.rmtree(directory, ignore_errors=True)
        hf_models.save(name, directory)
        for suffix in hf_models.MODELS[name].prompts:
            np.savez_compressed(directory / f"golden{suffix}.npz", **hf_models.golden(name, directory, suffix))
        print(name, sum(f.stat().st_size for f in directory.iterdir()) // 1024, "KiB")


def seq2seq(name: str) -> None:
    """One encoder-decoder. Those with third-party weights need ../shared/fixtures."""
    directory, fixtures = seq2seq_models.GOLDEN / name, Path(__file__).parents[2] / "shared" / "fixtures"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if name == "chronos_bolt":
        made = seq2seq_models.golden_bolt(fixtures / seq2seq_models.BOLT)
    elif name == "chronos2":
        chronos2_models.describe()
        with tempfile.TemporaryDirectory() as folder:
            made = chronos2_models.golden(chronos2_models.write(Path(folder)))
    elif fixture := seq2seq_models.MODELS[name].fixture:
        made = seq2seq_models.golden(name, fixtures / fixture)
    else:
        seq2seq_models.describe(name)
        with tempfile.TemporaryDirectory() as folder:
            made = seq2seq_models.golden(name, seq2seq_models.write(name, Path(folder)))
    np.savez_compressed(directory / "golden.npz", **made)
    print(name, sum(f.stat().st_size for f in directory.iterdir()) // 1024, "KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
