"""Ministral-3 (Mistral AI, 2025): as Mistral, with queries that grow with their position."""

from quire.models.names import DENSE, NameMap

NAME_MAP: NameMap = DENSE
