"""A YAML loader for files written by people: plain values only.

Refuses tags, aliases (and so every entity bomb) and duplicate keys. Truth values are `true` and `false` alone, so that
the category `NO` stays a text; dates stay texts, and so do 007, 0x1f, 1_000 and 12:30: numbers are those of JSON.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError


class PlainLoader(yaml.SafeLoader):
    """SafeLoader, less everything that surprises."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not allowed", event.start_mark)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ComposerError(None, None, "tags are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:  # noqa: ANN401 - as SafeLoader has it
        """Returns the text; the two halves by which JSON escapes a character beyond 16 bits become one."""
        text = super().construct_scalar(node)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le") if isinstance(text, str) else text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str | int | float | bool):
                raise ConstructorError(None, None, "keys must be plain", key.start_mark)
            if name in seen:
                raise ConstructorError(None, None, f"key {name!r} stands twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """SafeDumper that also quotes the texts which PlainLoader would take for numbers."""


INTEGER = r"^[-+]?(?:0|[1-9][0-9]*)$"
FLOAT = (
    r"^[-+]?(?:(?:0|[1-9][0-9]*)?[.][0-9]+|(?:0|[1-9][0-9]*)[.]?)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?[.](?:inf|Inf)$|^[.](?:nan|NaN)$"
)

PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
for _kind in (PlainLoader, PlainDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(INTEGER), list("-+0123456789"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(FLOAT), list("-+0123456789."))


def dump(plain: object) -> str:
    """Returns the text that PlainLoader reads as the same plain values."""
    text = partial(yaml.dump, plain, Dumper=PlainDumper, sort_keys=False, width=110)
    breaks = any(mark in repr(plain) for mark in ("\\x85", "\\u2028", "\\u2029"))  # line breaks that YAML would fold
    return text(allow_unicode=not breaks)
