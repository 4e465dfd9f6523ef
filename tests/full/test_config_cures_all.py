"""Every fix that a configuration message prints works when obeyed: the full counts of `test_config_cures.py`."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from test_config_cures import check_models, check_random


@pytest.mark.parametrize("seed", range(8))
def test_all_random_keys(seed: int) -> None:
    assert check_random(random.Random(seed), 750) > 200


@pytest.mark.parametrize("seed", range(4))
def test_all_random_models(seed: int) -> None:
    check_models(random.Random(seed), 400)
