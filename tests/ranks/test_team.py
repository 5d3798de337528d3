"""What the leader calls, the other rank does."""

import forked
import pytest
import team_run


@pytest.mark.slow
def test_two_ranks(tmp_path):
    done = forked.run(team_run.main, str(tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr  # nobody was told of a failure
