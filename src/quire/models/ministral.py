"""Ministral (Mistral AI, 2024): as Mistral; layer_types says which layers have a window."""

from quire.models.names import DENSE, NameMap

NAME_MAP: NameMap = DENSE
