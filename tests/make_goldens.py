# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden: the tiny models as Hugging Face directories and what Hugging Face computes with them.

python tests/make_goldens.py [NAME ...]        # needs the extra `oracle`; deterministic
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

import hf_models

GOLDEN = Path(__file__).parent / "golden"


def main(names: list[str]) -> None:
    for name in names or hf_models.MODELS:
        directory = GOLDEN / name
        shutil.rmtree(directory, ignore_errors=True)
        hf_models.save(name, directory)
        for suffix in hf_models.MODELS[name].prompts:
            np.savez_compressed(directory / f"golden{suffix}.npz", **hf_models.golden(name, directory, suffix))
        print(name, sum(f.stat().st_size for f in directory.iterdir()) // 1024, "KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
