"""What the documents point at is there: links, files of this repository, results and their list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RESULTS = ROOT / "docs" / "results"
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:src/gnomon|tests|tools|bench|docs|examples|training)/[\w./-]+)`")


def heading_anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as web pages of git hosts make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = []
    for link in LINK.findall(text):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (path.parent / name).resolve() if name else path
        anchors = heading_anchors(target.read_text(encoding="utf-8")) if anchor else {anchor}
        if not target.exists() or anchor not in anchors:
            missing.append(link)
    missing += [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    assert missing == []


def test_decisions_are_numbered_without_gaps() -> None:
    notes = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, note in enumerate(notes, start=1):
        assert note.name.startswith(f"{number:04d}-")
        assert note.read_text(encoding="utf-8").startswith(f"# {number}. ")


def test_every_result_is_listed_with_its_command() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \|$", text, re.M)
    listed = [row[0] for row in rows]
    there = sorted(path.name for path in RESULTS.iterdir() if path.name != "README.md")
    assert sorted(listed) == there
    assert all("`" in command for _, command, _, _ in rows)
    for path in RESULTS.glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8")), path.name


def test_a_lost_anchor_is_seen() -> None:
    anchors = heading_anchors("# A page\n## When the device is lost\n### `--minutes M`\n")
    assert anchors == {"a-page", "when-the-device-is-lost", "--minutes-m"}
