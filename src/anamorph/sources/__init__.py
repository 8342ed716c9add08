"""Sources: where private rows live. Files, frames and databases, read by the schema's rules, and counted."""

from anamorph.sources.source import Source, TableSource, check_structure, encode, open_source

__all__ = ["Source", "TableSource", "check_structure", "encode", "open_source"]
