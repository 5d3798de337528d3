"""The report of a run: one HTML file with charts, timelines and completions."""
