"""Signatures that can be read: of overloaded functions and of dataclasses."""

from __future__ import annotations

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

_OVERLOADED = (
    "flash4_torch.api",
    "flash4_torch.flex.attention",
    "flash4_torch.kvcache.append",
    "flash4_torch.kvcache.attend",
)


def setup(app: Sphinx) -> dict[str, bool]:
    results: dict[str, str] = {}
    for module in _OVERLOADED:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        # The last overload takes any flags, so it returns what any of them does.
        results |= {name: str(found[-1].return_annotation) for name, found in analyzer.overloads.items()}
        # autodoc takes the same analyzer, and would list overloads in place of the signature with all
        # keywords.
        analyzer.overloads.clear()

    def readable(
        _: Sphinx,
        kind: str,
        name: str,
        obj: object,
        options: object,
        signature: str | None,
        result: str | None,
    ) -> tuple[str | None, str | None]:
        if kind == "function" and getattr(obj, "__module__", None) in _OVERLOADED:
            result = results.get(name.rpartition(".")[2], result)
        # Sphinx cannot parse what dataclasses show for a default_factory.
        return signature and signature.replace("<factory>", "..."), result

    app.connect("autodoc-process-signature", readable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
