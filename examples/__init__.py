"""Small programs that use the package; `examples/README.md` lists them."""
