"""Tables of Lance namespaces as datasets."""

from raylance.source.namespace import NamespaceTable

__all__ = ["NamespaceTable"]
