"""What `rlhf lineage` prints: a tree, or a Mermaid diagram."""

from __future__ import annotations

from rich.console import Console

from tasks.lineage import LineageNode

_FINGERPRINT_CHARS = 12
_PLAIN = " ._-/:@=+,"  # beside letters and digits


def print_lineage(console: Console, node: LineageNode) -> None:
    """Print the tree from an artefact to its raw sources, and the links that do not hold.

    What was deleted and made again is named, too.
    """
    for line in lineage_lines(node):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    remade = [found for found in node.walk() if found.status == "remade"]
    for style, told in (("yellow", remade), ("red", node.broken)):
        for found in told:
            console.print(
                f"{found.status}: {found.path or found.key}: {found.note}",
                style=style,
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def lineage_lines(node: LineageNode) -> list[str]:
    """Return the tree as text; what is shown in full already is only named the second time."""
    lines: list[str] = []
    _grow(lines, node, node.stage or node.kind, ("", ""), set())
    return lines


def _grow(
    lines: list[str], node: LineageNode, name: str, indents: tuple[str, str], shown: set[str]
) -> None:
    """Add a node and all above it; ``indents`` are those of its first line and of the rest."""
    first, rest = indents
    head = f"{first}{name}: {node.kind} {node.fingerprint}"
    if node.status != "present":
        head += f" [{node.status}]"
    if node.key in shown and node.parents:
        lines.append(f"{head} (see above)")
        return
    shown.add(node.key)
    run = f"  (MLflow run {node.mlflow_run_id})" if node.mlflow_run_id else ""
    lines += [head, f"{rest}{'│ ' if node.parents else '  '}{node.path}{run}"]
    last = len(node.parents) - 1
    for index, (label, parent) in enumerate(node.parents.items()):
        is_last = index == last
        branch = ("└─ " if is_last else "├─ ", "   " if is_last else "│  ")
        _grow(lines, parent, label, (rest + branch[0], rest + branch[1]), shown)


def lineage_mermaid(tree: LineageNode) -> str:
    """Return a Mermaid flowchart, raw sources on top; broken links are red."""
    nodes = tree.walk()
    names = {node.key: f"n{index}" for index, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    for node in nodes:
        shape = '(["{}"])' if node.stage is None else '["{}"]'
        lines.append(f"    {names[node.key]}{shape.format(_label(node))}")
    for node in nodes:
        lines += [
            f"    {names[parent.key]} -->|{_text(label)}| {names[node.key]}"
            for label, parent in node.parents.items()
        ]
    broken = [names[node.key] for node in tree.broken]
    if broken:
        lines += [
            "    classDef broken stroke:#c00,stroke-width:3px,color:#c00",
            f"    class {','.join(broken)} broken",
        ]
    return "\n".join(lines)


def _label(node: LineageNode) -> str:
    title = node.stage or node.path.rpartition("/")[2] or node.kind
    lines = [title, f"{node.kind} {node.fingerprint[:_FINGERPRINT_CHARS]}"]
    if node.status != "present":
        lines.append(node.status)
    return "<br/>".join(_text(line) for line in lines)


def _text(text: str) -> str:
    """Return text in which nothing ends a Mermaid label or is HTML: odd characters as entities."""
    line = " ".join(text.split())
    return "".join(c if c.isalnum() or c in _PLAIN else f"#{ord(c)};" for c in line)
