"""The code in the manual: ```python blocks run, and a ```text block right below is what one printed.

    python tests/doc_blocks.py [FILE.md …]     write again what the blocks print (again, if lines moved)

The blocks of a file share their names, as a session would.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
WIDTH = 100

_BLOCK = re.compile(
    r"^```(?P<language>[\w-]*)\n(?P<text>.*?)^```\n(?P<below>\s*^```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_HASH = re.compile(r"\b[0-9a-f]{16}\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the text block right below it, if there is one."""

    language: str
    text: str
    line: int
    output: str | None
    span: tuple[int, int]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(
            match["language"],
            match["text"],
            text[: match.start("text")].count("\n") + 1,
            match["output"],
            match.span("output"),
        )
        for match in _BLOCK.finditer(text)
    ]


def run(page: Path) -> list[tuple[Block, str]]:
    """Each python block of a page with what it printed."""
    names: dict[str, Any] = {"__name__": f"manual_{page.stem}"}
    code = [block for block in blocks(page) if block.language == "python"]
    return [(block, _printed(block, page, names)) for block in code]


def _printed(block: Block, page: Path, names: dict[str, Any]) -> str:
    text = page.read_text("utf-8")
    # What messages and captured graphs say of source lines is looked up here.
    linecache.cache[page.name] = (len(text), None, text.splitlines(keepends=True), page.name)
    source = "\n" * (block.line - 1) + block.text
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _columns():
        exec(compile(source, page.name, "exec"), names)
    return _plain(printed.getvalue())


def _plain(printed: str) -> str:
    """Without blanks at the ends of lines, empty lines at the end, and hashes."""
    lines = [_HASH.sub("…", line.rstrip()) for line in printed.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)


@contextlib.contextmanager
def _columns() -> Any:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def rewrite(page: Path) -> bool:
    """Write what the blocks print into the page; whether it changed."""
    before = text = page.read_text("utf-8")
    for block, printed in reversed(run(page)):
        if block.output is not None:
            text = text[: block.span[0]] + printed + text[block.span[1] :]
    page.write_text(text, "utf-8")
    return text != before


def main() -> None:
    """Rewrite the pages named, or all."""
    import torch

    torch.set_num_threads(1)
    os.chdir(ROOT)
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        print(f"{page.relative_to(ROOT)}: {'written' if rewrite(page) else 'as it was'}")


if __name__ == "__main__":
    main()
