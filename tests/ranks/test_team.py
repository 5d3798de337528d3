"""What the leader calls, the other rank does."""

import forked
import pytest
import team_run


@pytest.mark.slow
def test_two_ranks(tmp_path):
    done = forked.run(team_run.main, str(tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr  # nobody was told of a failure


@pytest.mark.slow
def test_both_ranks_gather_and_export_the_same_buckets(tmp_path, tiny_model):
    check = team_run.check_packed_weights
    done = forked.run(team_run.main, str(tmp_path), check, tiny_model, timeout=120)
    assert done.returncode == 0, done.stderr
