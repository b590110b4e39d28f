"""Pieces of HTML pages that need nothing else: text, tables, drawings as SVG, styles. They know nothing of what is shown."""
