import pytest
from transformers import AutoTokenizer
from worlds import with_tools


@pytest.fixture(scope="session")
def tools_tokenizer(exact_model, tmp_path_factory):
    """Folder of a tokenizer whose chat template has tools, for `exact_model`."""
    folder = str(tmp_path_factory.mktemp("tools"))
    with_tools(AutoTokenizer.from_pretrained(exact_model)).save_pretrained(folder)
    return folder
