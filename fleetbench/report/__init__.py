"""Reports: one data model, drawn as a self-contained HTML page."""
