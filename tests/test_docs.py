"""Links of the documentation, its code blocks and its configuration files."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import nbclient
import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors.index import slugify
from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

from benchmarks import page as results_page

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
NOTEBOOKS = sorted(ROOT.glob("docs/tutorials/*.ipynb"))
HOSTS = {
    "arxiv.org",
    "docs.nvidia.com",
    "docs.ray.io",
    "docs.vllm.ai",
    "github.com",
    "huggingface.co",
    "keepachangelog.com",
    "mutmut.readthedocs.io",
    "plotly.com",
    "semver.org",
}
"""Hosts that pages may link to; add one after you have looked at the page it serves."""


def text(path: Path) -> str:
    """Markdown of a page or of a notebook's cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def tokens(path: Path) -> list[Token]:
    parsed = MarkdownIt("commonmark").enable("table").parse(text(path))
    return [part for token in parsed for part in (token, *(token.children or ()))]


def links(path: Path) -> list[str]:
    return [str(t.attrs.get("href") or t.attrs["src"]) for t in tokens(path) if is_link(t)]


def is_link(token: Token) -> bool:
    return token.type in ("link_open", "image")


def anchors(path: Path) -> set[str]:
    """Names of the headings, as GitHub and MyST make them."""
    parsed = MarkdownIt("commonmark").parse(text(path))
    titles = [parsed[i + 1] for i, token in enumerate(parsed) if token.type == "heading_open"]
    return {slugify("".join(c.content for c in title.children or ())) for title in titles}


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link, if anything."""
    url = urlsplit(link)
    if url.scheme:
        if url.scheme != "https" or url.hostname not in HOSTS:
            return "an unknown host"
        wanted = r"/(abs|pdf|html)/\d{4}\.\d{4,5}(v\d+)?"
        if url.hostname == "arxiv.org" and not re.fullmatch(wanted, url.path):
            return "not an arXiv identifier"
        return None
    target = page.parent / url.path if url.path else page
    if not target.exists():
        return "no such file"
    generated = target.parent.name == "reference"
    if url.fragment and not generated and url.fragment not in anchors(target):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    problems = {link: why for link in links(page) if (why := problem(page, link))}
    assert not problems


def test_pages_that_are_named_exist() -> None:
    """Docstrings, messages and tests name pages by their path."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*/*.md"), ROOT / "Makefile"]
    for folder in ("lit_rlsched", "benchmarks", "tests"):
        files += (ROOT / folder).rglob("*.py")
    pattern = re.compile(r"\bdocs/[\w/]+\.(?:md|png)")
    named = {name for file in files for name in pattern.findall(file.read_text())}
    assert len(named) > 8
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_page_of_results_is_what_the_figures_give() -> None:
    """`python -m benchmarks page` writes it."""
    assert results_page.page(text(results_page.PAGE)) == text(results_page.PAGE)


PYTHON = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but those after `<!-- skip: next -->`; a plain block after one is its output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # pages name its model and its files
    for example in Document.parse(str(page), PythonCodeBlockParser(), SkipParser()).examples():
        example.evaluate()
    said = capsys.readouterr().out
    for code, output in pairwise(tokens(page)):
        if (code.type, code.info, output.type, output.info) == ("fence", "python", "fence", ""):
            assert output.content in said


@pytest.mark.parametrize("name", ["own_task", "drop_in"])
def test_tutorials_show_the_examples(name: str) -> None:
    page, example = ROOT / f"docs/tutorials/{name}.md", ROOT / "examples" / name
    source = example.with_suffix(".py").read_text()
    skipped = [b for a, b in pairwise(tokens(page)) if a.content.startswith("<!-- skip")]
    lines = [line.strip() for block in skipped for line in block.content.splitlines()]
    assert len(lines) > 10
    assert not [line for line in lines if line.strip(".").split("  #")[0] not in source]
    for block in (t.content for t in tokens(page) if t.info == "yaml"):
        shown, whole = map(yaml.safe_load, (block, example.with_suffix(".yaml").read_text()))
        assert shown == whole


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return [out.get("text", "a picture") for out in outputs]


@pytest.mark.slow
def test_the_notebook_gives_the_output_that_it_is_stored_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/tutorials/notebook.ipynb", as_version=4)
    stored = printed(notebook)
    assert stored.count("a picture") == 2 and "torch is imported: False\n" in stored
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert printed(notebook) == stored


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """It builds without a warning; every page has a title, navigation and its pictures."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr[-4000:]
    listed = (tmp_path / "llms.txt").read_text()
    for page in [*ROOT.glob("docs/*/*.md"), *NOTEBOOKS]:
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        html = BeautifulSoup((tmp_path / path).read_text(), "html.parser")
        assert html.title and html.h1 and html.select_one(".sidebar-tree a.current"), path
        for picture in html.find_all("img"):
            assert (tmp_path / path.parent / str(picture["src"])).exists(), path
        assert f"]({path}): " in listed
    settings = (tmp_path / "reference/settings.html").read_text()
    for name in ("RolloutDataModule.seed", "GRPOModule.lora_rank", "TailBatching.prompt_ratio"):
        assert f'id="confval-{name}"' in settings
    combinations = (tmp_path / "reference/combinations.html").read_text()
    assert "Both decide when a round ends. Remove one of them." in combinations
