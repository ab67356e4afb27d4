"""Copies of experts on several ranks (EPLB): the choice among the copies of an expert, and the memory that moves."""
