"""What can be imported from the packages themselves."""

import importlib

import pytest

PACKAGES = ("callbacks", "data", "engines", "rewards", "rollout", "training")


@pytest.mark.parametrize("package", ["lit_rlsched", *(f"lit_rlsched.{name}" for name in PACKAGES)])
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
