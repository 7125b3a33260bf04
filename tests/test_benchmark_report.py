# SPDX-License-Identifier: Apache-2.0
"""Files of results that several runs of a benchmark add to."""

from __future__ import annotations

import json
import sys

import pytest

from conftest import TESTS

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
import report

pytestmark = pytest.mark.unsanitized
HERE = {"cpu": "a", "cores": 2}


def test_results_of_one_machine_are_gathered(tmp_path):
    path = tmp_path / "results.json"
    assert report.gathered(None, HERE) == report.gathered(path, HERE) == {"machine": HERE, "cells": {}}
    path.write_text(json.dumps({"machine": HERE, "cells": {"one": 1}}))
    assert report.gathered(path, HERE)["cells"] == {"one": 1}
    with pytest.raises(SystemExit, match="measured on another machine.*give another file"):
        report.gathered(path, HERE | {"cores": 4})
