"""Whatever is refused: `tests/refusals.py` lists it."""

import pytest
from refusals import AT_FIT, ROWS

from lit_rlsched.settings import UsageError


@pytest.mark.parametrize(("make", "says"), ROWS)
def test_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize(("make", "says"), AT_FIT)
def test_refused_before_a_round(fit, tiny_model, make, says):
    with pytest.raises(UsageError, match=says):
        make(fit, tiny_model)
