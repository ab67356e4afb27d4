"""Mistral 7B v0.2 and later (Mistral AI): no biases, full attention."""

from quire.models.names import DENSE, NameMap

NAME_MAP: NameMap = DENSE
