"""The website. Built by ``python -m lessons site``, which lays notebooks and README beside this."""

from __future__ import annotations

from minibatch import __version__

project = "minibatch"
author = "the minibatch authors"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**.ipynb_checkpoints"]

# Lessons are shown as they are committed: nothing is executed, nothing is fetched.
nb_execution_mode = "off"
nb_render_image_options = {"alt": "picture of a run"}
myst_enable_extensions: list[str] = []
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.mime_priority", "docutils"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True

html_theme = "furo"
html_title = "minibatch"
html_show_sphinx = False
html_copy_source = False
html_static_path: list[str] = []
html_theme_options = {"top_of_page_buttons": []}
