"""Requests whose prompts or answers are vectors."""
