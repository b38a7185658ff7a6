"""Write the generated pages of docs/ (today: docs/trace.md, from the schema)."""

from __future__ import annotations

from pathlib import Path

from workbench.schema import schema_markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Write every generated page."""
    DOCS.mkdir(exist_ok=True)
    (DOCS / "trace.md").write_text(schema_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
