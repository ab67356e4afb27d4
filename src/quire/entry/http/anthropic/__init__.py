"""Anthropic's Messages API: what its requests, answers and errors look like, over what the OpenAI routes share."""
