"""View: results as terminal tables, Markdown and HTML pages, and traces for Perfetto."""
