"""Sphinx's settings. `make docs` builds the site into build/docs; a warning is an error there."""

import sys
from pathlib import Path

import flash4_torch

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "flash4_torch"
author = "flash4_torch authors"
project_copyright = author
version = release = flash4_torch.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "environment_variables",
    "repository_links",
    "signatures",
]
exclude_patterns = ["extensions", "static"]
nitpicky = True
# torch's own documentation is not at hand while this is built.
nitpick_ignore_regex = [
    ("py:class", r"(collections|nn|optional|os|pathlib|torch|Tensor)\b.*"),
    ("py:class", r"flash4_torch\.(emulator\.ptx\.Kernel|masks\.T|nn\.multihead\.Self)"),
    # Names of torch, or of types, of which an annotation has the bare name.
    ("py:class", "AuxOutput|AuxRequest|BlockMask|DeviceMesh|Layout|Mod|ParallelStyle|ProcessGroup|Window"),
    # A NamedTuple's signature leaves it unqualified.
    ("py:class", "Key"),
    # `attention` in a docstring is a link if there is such a page, else a name like any other.
    ("py:obj", ".*"),
]

myst_heading_anchors = 3

default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 90

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = project
html_show_sphinx = False
html_copy_source = False
html_domain_indices = False
html_show_sourcelink = False
