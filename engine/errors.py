"""What can go wrong with a workflow, as exceptions whose message is what the user reads."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NodeError", "WorkflowError"]


class WorkflowError(ValueError):
    """A workflow that can't be run. ``problems`` holds one sentence each; nothing was loaded or written."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = list(problems)
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{self.source}: {len(self.problems)} problems{lines}"


class NodeError(RuntimeError):
    """A node failed while it ran. ``node_id``, ``class_type`` and ``title`` say which; ``__cause__`` says why."""

    def __init__(self, node_id: str, class_type: str, title: str, problem: str):
        self.node_id = node_id
        self.class_type = class_type
        self.title = title
        self.problem = problem
        super().__init__(node_id, class_type, title, problem)

    def __str__(self) -> str:
        return f"{node_name(self.node_id, self.class_type, self.title)}: {self.problem}"


def node_name(node_id: str, class_type: str, title: str = "") -> str:
    """How messages call a node: ``node 3 KSampler "my title"``."""
    shown = f' "{title}"' if title and title != class_type else ""
    return f"node {node_id} {class_type}{shown}"
