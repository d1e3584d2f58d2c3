"""YAML and JSON that somebody else wrote: read within bounds, or refused with a ValueError.

The parsers themselves raise other errors for what is nested too deeply, for a thirteenth month, or for
numbers of many digits; and a few lines of YAML whose aliases name each other stand for any amount of data.
"""

from __future__ import annotations

import json

import yaml

MOST_DEPTH = 100
"""Of flow collections, and of indents: what PyYAML costs grows with the square of it."""
MOST_NODES = 1_000_000
"""Of a YAML document, aliases counted as often as they stand; a plan of 4096 targets has a tenth."""


class _Loader(yaml.SafeLoader):
    """Stops where a document is nested too deeply."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803
        self._refuse_deep(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._refuse_deep(len(self.indents))
        return bool(super().add_indent(column))

    def _refuse_deep(self, depth: int) -> None:
        if depth >= MOST_DEPTH:
            raise ValueError("it is nested too deeply")


def read_json(text: str | bytes) -> object:
    """What a JSON document says. Raises ValueError."""
    try:
        found: object = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_yaml(text: str) -> object:
    """What a YAML document says, in plain values. Raises ValueError."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _weigh(node, {})
            found: object = loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (TypeError, AttributeError, LookupError) as error:
        # PyYAML's own constructors, given a tag that does not fit its value.
        raise ValueError(f"a value does not fit its tag ({error})") from error
    return found


def _weigh(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes a node stands for. Raises ValueError when they are too many, or without end."""
    weight = known.get(id(node), -1)
    if weight == 0:
        raise ValueError("an alias stands inside of what it names")
    if weight < 0:
        known[id(node)] = 0
        if isinstance(node, yaml.ScalarNode) and not node.value.isascii():
            node.value = _joined(node.value)
        weight = 1 + sum(_weigh(child, known) for child in _children(node))
        known[id(node)] = weight
    if weight > MOST_NODES:
        raise ValueError(f"its aliases make more than {MOST_NODES} values")
    return weight


def _joined(text: str) -> str:
    """JSON writes what is not in Unicode's first plane as two halves, which YAML reads one by one."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [one for pair in node.value for one in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
