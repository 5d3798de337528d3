"""Sphinx builds the documentation with these settings: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import lit_rlsched

project = "lit_rlsched"
copyright = "the authors of lit_rlsched"  # noqa: A001
release = lit_rlsched.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "reference",
    "llms_txt",
]
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = f"lit_rlsched {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebook is stored with its output, which a test repeats

default_role = "code"  # docstrings write `code` as Markdown does
add_module_names = False  # names are imported from the package that lists them
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Lightning have links into its own site

# Those of PyTorch and Lightning have only the names that the reference mentions. transformers has
# no inventory, and neither has Lightning's site any more.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3.11", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
    "lightning": ("https://lightning.ai/docs/pytorch/stable", "inventories/lightning.inv"),
}
copybutton_prompt_text = r"\$ "
