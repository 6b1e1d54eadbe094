"""The directive `environment-variables`: what `flash4_torch/env.py` says of each variable."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flash4_torch import env


class EnvironmentVariables(SphinxDirective):
    """A definition for each variable, which the role `envvar` links to."""

    def run(self) -> list[nodes.Node]:
        lines = ["```{eval-rst}"]
        for variable in env.ALL:
            default = f"``{variable.default}``" if variable.default else "unset"
            lines += [f".. envvar:: {variable.name}", "", f"   {variable.meaning}", ""]
            if variable.choices:
                lines += ["   Values: " + ", ".join(f"``{choice}``" for choice in variable.choices) + ".", ""]
            lines += [f"   Default: {default}.", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("environment-variables", EnvironmentVariables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
