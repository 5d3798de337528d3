"""Sphinx extension that writes `llms.txt` (https://llmstxt.org): each page with one line on it."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def first_sentence(page: nodes.document) -> str:
    """Return the first sentence of a page's first paragraph."""
    found = (p for p in page.findall(nodes.paragraph) if isinstance(p.parent, nodes.section))
    paragraph = next(found, None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return text.partition(". ")[0].rstrip(".:")


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the pages in the order of the navigation."""
    if error is not None or app.builder.name != "html":
        return
    root = app.config.root_doc
    order = [root, *app.env.toctree_includes[root]]
    lines = [f"# {app.config.project}", "", f"> {first_sentence(app.env.get_doctree(root))}.", ""]
    for name in dict.fromkeys(order[1:]):
        title = app.env.titles[name].astext()
        line = first_sentence(app.env.get_doctree(name))
        lines.append(f"- [{title}]({app.builder.get_target_uri(name)}): {line}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
